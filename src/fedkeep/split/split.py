"""The split: which parameters are private, and the only way for the others to leave a client.

Source: FURL, §3.1 (every model is divided into federated parameters w_f and private parameters w_p).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import Tensor, nn

from fedkeep.core.errors import SplitError, UploadError, did_you_mean
from fedkeep.core.params import Params, difference_of_names, nonfinite


@dataclass(frozen=True)
class Split:
    """Glob patterns that name the private parameters and buffers; everything else is federated.

    Args:
        private: patterns such as ``"user"`` or ``"head.*"``, matched against the module's own names
            (case-sensitive). Empty: everything is federated. ``("*",)``: everything is private.
    """

    private: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.private, str):
            object.__setattr__(self, "private", (self.private,))
        object.__setattr__(self, "private", tuple(self.private))

    def is_private(self, name: str) -> bool:
        """Tell whether a pattern matches ``name``."""
        return any(fnmatchcase(name, pattern) for pattern in self.private)

    def private_names(self, names: Iterable[str]) -> list[str]:
        """Return the private ones of ``names``, in their order."""
        return [name for name in names if self.is_private(name)]

    def federated(self, params: Mapping[str, Tensor]) -> Params:
        """Return the federated half of ``params``."""
        return {name: value for name, value in params.items() if not self.is_private(name)}

    def personal(self, params: Mapping[str, Tensor]) -> Params:
        """Return the private half of ``params``."""
        return {name: value for name, value in params.items() if self.is_private(name)}

    def merge(self, federated: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Params:
        """Return both halves together.

        Raises:
            SplitError: a name stands in the wrong half.
        """
        wrong = [n for n in federated if self.is_private(n)] + [n for n in private if not self.is_private(n)]
        if wrong:
            raise SplitError(f"These names stand in the wrong half of the split: {wrong}.")
        return {**federated, **private}

    def upload(self, received: Mapping[str, Tensor], trained: Mapping[str, Tensor], weight: float) -> Upload:
        """Return what leaves the client: the change of every federated parameter, and the client's weight.

        Args:
            received: federated parameters as the server sent them.
            trained: all parameters after local training; the private ones are left behind here.
            weight: the client's number of training examples (or 1).
        """
        deltas = {
            name: (trained[name] - start if start.is_floating_point() else trained[name].clone()).detach()
            for name, start in received.items()
            if not self.is_private(name)
        }
        return Upload(deltas, weight, _key=Upload._made_by_split)

    def check(self, module: nn.Module) -> None:
        """Check the split against a module: patterns match, and no storage is shared across the halves.

        Raises:
            SplitError: a pattern matches nothing, or a private and a federated tensor are tied.
        """
        tensors = dict(module.state_dict(keep_vars=True))
        for pattern in self.private:
            if not any(fnmatchcase(name, pattern) for name in tensors):
                raise SplitError(
                    f"Split pattern {pattern!r} matches no parameter of {type(module).__name__}."
                    f"{did_you_mean(pattern, tensors) or f' Its parameters are {list(tensors)}.'}"
                )
        owners: dict[int, str] = {}
        for name, value in tensors.items():
            if value.numel() == 0:
                continue
            pointer = value.untyped_storage().data_ptr()
            other = owners.setdefault(pointer, name)
            if self.is_private(other) != self.is_private(name):
                private, federated = (other, name) if self.is_private(other) else (name, other)
                raise SplitError(
                    f"Private {private!r} and federated {federated!r} of {type(module).__name__} share one storage "
                    f"(tied weights), so the private values would leave with the federated ones. "
                    f"Untie them, or put both in the same half."
                )
        floating = {name for name, _ in module.named_buffers()} - set(tensors)
        changing = sorted(n for n in floating if self.is_private(n))
        if changing:
            raise SplitError(
                f"Private buffers {changing} are not persistent, so they cannot be kept. Register them with "
                f"persistent=True."
            )

    def table(self, module: nn.Module) -> list[dict[str, object]]:
        """Return a row ``{name, shape, half, kind, bytes}`` for every parameter and buffer."""
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return [
            {
                "name": name,
                "shape": list(value.shape),
                "half": "private" if self.is_private(name) else "federated",
                "kind": "parameter" if name in parameters else "buffer",
                "bytes": value.numel() * value.element_size(),
            }
            for name, value in module.state_dict(keep_vars=True).items()
        ]


@dataclass(frozen=True)
class Upload:
    """What leaves a client: changes of federated parameters, and a weight. Only ``Split.upload`` makes one.

    Attributes:
        deltas: trained − received for every federated name (integer counters: the trained value).
        weight: the client's number of training examples.
    """

    deltas: Params
    weight: float
    _key: object = None
    _made_by_split: ClassVar[object] = object()

    def __post_init__(self) -> None:
        if self._key is not Upload._made_by_split:
            raise SplitError(
                "An Upload is made by Split.upload alone, so that no private name can leave by accident."
            )


def check_upload(upload: Upload, received: Mapping[str, Tensor], client: str) -> None:
    """Check an upload's names, shapes, dtypes and finiteness against what the server sent.

    Raises:
        UploadError: names the client and the first fault.
    """
    fault = difference_of_names(received, upload.deltas)
    if not fault:
        for name, start in received.items():
            got = upload.deltas[name]
            if got.shape != start.shape or got.dtype != start.dtype:
                fault = f"{name!r} should be {tuple(start.shape)} {start.dtype}, is {tuple(got.shape)} {got.dtype}"
                break
    if not fault and (bad := nonfinite(upload.deltas)) is not None:
        fault = f"{bad!r} holds a NaN or an infinity"
    if not fault and not 0 <= upload.weight < float("inf"):
        fault = f"its weight is {upload.weight}"
    if fault:
        raise UploadError(f"The upload of client {client!r} was refused: {fault}.")
