"""The usual model for each kind of data; what trains it stands in ``methods.usual``."""

from __future__ import annotations

from collections.abc import Mapping

from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.tasks import tasks_in

MODELS: Mapping[str, str] = {
    "text": "bag_of_words",
    "image": "resnet",
    "item": "matrix_factorization",
    "x": "mlp",
}
"""By the column that it reads, the first that there is."""


def usual_model(encoding: Encoding) -> str:
    """Return the kind of model that ``model.kind = "auto"`` is for data in an encoding.

    Raises:
        ConfigError: there is none for such columns.
    """
    tasks = tasks_in(encoding.meta)
    found = next((model for column, model in MODELS.items() if column in encoding.columns), None)
    deep = found == "mlp" and "features" not in encoding.sizes
    if found is None or deep or len(tasks) > 1 or tasks[0].kind.axes == 2:
        columns = ", ".join(n for n in encoding.columns if n != "label")
        raise ConfigError(
            f"model.kind: there is no usual model for the columns {columns} and the task "
            f"{' and '.join(task.kind.name for task in tasks)}. Name one: `fedkeep list` shows the built-in ones; your own is "
            f"'package.module:Class'."
        )
    return found


def encoding_of(data: FederatedData | Encoding) -> Encoding:
    """Return the encoding that data are in, as far as a model and a loss depend on it."""
    return data if isinstance(data, Encoding) else Encoding.of(Ready(data=data).summary())
