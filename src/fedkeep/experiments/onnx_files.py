"""A client's model as ONNX, compared with torch's numbers."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.errors import MethodError, needing
from fedkeep.core.net import Takes, float_type, logits_of
from fedkeep.core.params import Params
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines.batches import load_batch
from fedkeep.engines.vectorised.vectorised import PACKS, Calls
from fedkeep.methods.labels import output_of
from fedkeep.tasks import Task, tasks_in

TOLERANCE = 1e-5
"""The largest difference from torch's outputs, of their largest, or of 1 where none is larger."""


class _Columns(nn.Module):
    """A model that is given its columns as one argument, and gives what is judged of each task."""

    def __init__(self, model: nn.Module, tasks: Sequence[Task]) -> None:
        super().__init__()
        self.model, self.tasks = model, tasks

    def forward(self, columns: Params) -> tuple[Tensor, ...]:
        found = logits_of(self.model(**columns))
        return tuple(task.in_units(output_of(found, task.name)) for task in self.tasks)


def write_onnx(model: nn.Module, data: FederatedData, client: int, path: Path) -> None:
    """Write a model as ONNX for any number of examples, of any length, and check it on a client's own.

    The file has one output for each task, by its name; ``output`` where the data have one task without a name.

    Args:
        model: in evaluation mode.
        data: tell the model's columns, and the tasks.
        client: whose examples it is tried on, by index.
        path: the file.

    Raises:
        ConfigError: onnx, onnxscript or onnxruntime is missing.
        MethodError: the model cannot be written as ONNX, or onnxruntime cannot compute it, or gives other numbers.
    """
    with needing("ONNX", "onnxruntime and onnxscript", "onnx"):
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    who = type(getattr(model, "module", model)).__name__
    takes = Takes(f"{who}.forward", model.forward)
    tasks = tasks_in(data.meta)
    few, more = (takes.of(_examples(model, data, client, count)) for count in (2, 5))
    any_size = torch.export.Dim.DYNAMIC
    shapes = {
        n: {0: any_size} | ({1: any_size} if isinstance(data.columns.get(n), Ragged) else {}) for n in few
    }
    off: list[float] = []
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings(
                "ignore", r".*LeafSpec.* is deprecated", FutureWarning
            )  # torch's of itself
            shown = _Columns(model, tasks)
            program = torch.export.export(shown, (few,), dynamic_shapes={"columns": shapes}, strict=False)
            written = torch.onnx.export(
                program,
                (few,),
                input_names=list(few),
                output_names=[task.name or "output" for task in tasks],
                dynamo=True,
                verbose=False,
            )
            assert written is not None
            written.save(path)
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            for columns in (few, more):
                found = session.run(None, {i.name: columns[i.name].numpy() for i in session.get_inputs()})
                for one, wanted in zip(found, shown(columns), strict=True):
                    gap = (torch.from_numpy(one) - wanted).abs().max() / wanted.abs().max().clamp_min(1)
                    off.append(float(gap))
    except Exception as error:
        calls = _calls(model, few)
        if "__len__" in calls and "specialized" in str(error):
            raise MethodError(
                "{who} cannot be written as ONNX: it calls len() on a tensor, a number that stays as it was. Say "
                "x.shape[0] or x.size(0) in place of len(x), or leave out --onnx.",
                who=who,
            ) from error
        if PACKS in calls:
            raise MethodError(
                "{who} cannot be written as ONNX: it calls pack_padded_sequence, which makes shapes of lengths. Give "
                "lengths to fedkeep.nn.GRU or LSTM, layer(x, lengths), or leave out --onnx.",
                who=who,
            ) from error
        why = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …").rstrip(".")
        raise MethodError(
            "{who} cannot be written as ONNX: {why}. Leave out --onnx.", who=who, why=why
        ) from error
    for by in off:
        if not by <= TOLERANCE:
            raise MethodError(
                "{who} as ONNX gives other numbers than torch, by {by:.1e}. Leave out --onnx.", who=who, by=by
            )


def _calls(model: nn.Module, columns: Params) -> set[str]:
    """Return the names of torch's functions that a model calls."""
    calls = Calls()
    with contextlib.suppress(Exception), torch.no_grad(), calls:
        model(**columns)
    return calls.seen


def _examples(model: nn.Module, data: FederatedData, client: int, count: int) -> Params:
    """Return so many of a client's examples, from the first again where it has fewer, without their labels.

    Texts and series are padded to two steps at least: torch would take a length of 1 for the only one there is.
    """
    rows, labels = data.rows(client), {task.label for task in tasks_in(data.meta)}
    repeated = np.resize(np.arange(rows.start, rows.stop), count)
    batch = load_batch(data, repeated, "cpu", float_type(model))
    found = {name: value for name, value in batch.items() if name not in labels}
    texts = {n: v for n, v in found.items() if isinstance(data.columns.get(n), Ragged)}
    return found | {
        n: F.pad(v, (*(0, 0) * (v.dim() - 2), 0, max(0, 2 - v.shape[1]))) for n, v in texts.items()
    }
