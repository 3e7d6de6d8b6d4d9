"""What a configuration leaves open, in one record: a model for each kind of data, and what trains a kind of model.

Tables and texts were tried on public sets; rates of the other models are ordinary ones. All of it is plain SGD, which every
method takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import Optimizer
from fedkeep.data import FederatedData
from fedkeep.data.preparation import Encoding, Ready
from fedkeep.tasks import tasks_in


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What trains a kind of model.

    Attributes:
        rate: the learning rate.
        rate_of_numbers: where numbers are predicted: squared errors have no bound, nor have their gradients.
        rates: further rates by pattern.
        batch_size: examples a mini-batch. Clients have few; so many steps are worth more than fast ones.
    """

    rate: float = 0.1
    rate_of_numbers: float = 0.03
    rates: tuple[tuple[str, float], ...] = ()
    batch_size: int = 8

    def optimizer(self, numbers: bool) -> Optimizer:
        """Return the optimiser, of a task of numbers or of classes."""
        rate = self.rate_of_numbers if numbers else self.rate
        return Optimizer(learning_rate=rate, rates=self.rates)


OWN = Usual(rate_of_numbers=0.1, batch_size=32)
"""Of models of one's own: as of ``Phase``."""
USUAL: Mapping[str, Usual] = {
    "linear": Usual(),
    "mlp": Usual(),
    "bag_of_words": Usual(rates=(("embedding.*", 3.0),)),
    "text_classifier": Usual(rates=(("embedding.*", 3.0),)),
    "document": Usual(rates=(("embedding.*", 3.0),)),
    "resnet": Usual(batch_size=16),
    "cnn": Usual(batch_size=16),
    "cifar_cnn": Usual(batch_size=16),
    "fashion_cnn": Usual(batch_size=16),
    "matrix_factorization": Usual(rate_of_numbers=0.1),
}
"""By ``model.kind``."""

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
