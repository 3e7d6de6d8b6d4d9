"""A client's model as ONNX, compared with torch's numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError, MethodError, first_line
from fedkeep.core.net import Takes, every_tensor
from fedkeep.core.params import Params
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines import tasks_of
from fedkeep.engines.batches import float_type, load_batch

TOLERANCE = 1e-5
"""The largest difference from torch's outputs, of their largest."""


class _Columns(nn.Module):
    """A model that is given its columns as one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, columns: Params) -> Tensor:
        found: Tensor = self.model(**columns)
        return found


def write_onnx(model: nn.Module, data: FederatedData, client: int, path: Path) -> None:
    """Write a model as ONNX for any number of examples, of any length, and check it on a client's own.

    Args:
        model: in evaluation mode; gives one tensor.
        data: tell the model's columns.
        client: whose examples it is tried on, by index.
        path: the file.

    Raises:
        ConfigError: onnx, onnxscript or onnxruntime is missing.
        MethodError: the model cannot be written as ONNX, or onnxruntime gives other numbers.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs {error.name}, which is not installed: pip install 'fedkeep[onnx]'."
        ) from error
    who = type(getattr(model, "module", model)).__name__
    takes = Takes(f"{who}.forward", model.forward)
    few, more = (takes.of(_examples(model, data, client, count)) for count in (2, 5))
    any_size = torch.export.Dim.DYNAMIC
    shapes = {
        n: {0: any_size} | ({1: any_size} if isinstance(data.columns.get(n), Ragged) else {}) for n in few
    }
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings(
                "ignore", r".*LeafSpec.* is deprecated", FutureWarning
            )  # torch's of itself
            shown = _Columns(model)
            program = torch.export.export(shown, (few,), dynamic_shapes={"columns": shapes}, strict=False)
            written = torch.onnx.export(program, (few,), input_names=list(few), dynamo=True, verbose=False)
            assert written is not None
            written.save(path)
    except Exception as error:
        raise MethodError(
            f"{who} cannot be written as ONNX: {first_line(error)}. Leave out --onnx."
        ) from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for columns in (few, more):
        (found,) = session.run(None, {i.name: columns[i.name].numpy() for i in session.get_inputs()})
        wanted: Tensor = model(**columns).detach()
        off = float((torch.from_numpy(found) - wanted).abs().max() / wanted.abs().max().clamp_min(1))
        if not off <= TOLERANCE:
            raise MethodError(
                f"{who} as ONNX gives other numbers than torch, by {off:.1e}. Leave out --onnx."
            )


def _examples(model: nn.Module, data: FederatedData, client: int, count: int) -> Params:
    """Return so many of a client's examples, from the first again where it has fewer, without their labels."""
    rows, labels = data.rows(client), {task.label for task in tasks_of(data)}
    repeated = np.resize(np.arange(rows.start, rows.stop), count)
    batch = load_batch(data, repeated, "cpu", float_type(every_tensor(model)))
    return {name: value for name, value in batch.items() if name not in labels}
