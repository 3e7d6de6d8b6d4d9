"""The split: which parameters are private, and the only way for the others to leave a client.

Source: FURL, §3.1 (every model is divided into federated parameters w_f and private parameters w_p).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.core.errors import SplitError, UploadError, did_you_mean
from fedkeep.core.params import CLIENT, Params, difference_of_names, is_state, nbytes, nonfinite


@lru_cache(maxsize=1 << 14)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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
        """Tell whether a pattern matches ``name``; a client's state is private, the server's is not."""
        return name.startswith(CLIENT) if is_state(name) else _matches(name, self.private)

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

    def upload(
        self,
        received: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        weight: float,
        rows: Mapping[str, Tensor] | None = None,
    ) -> Upload:
        """Return what leaves the client: the change of every federated parameter, and the client's weight.

        Args:
            received: federated parameters as the server sent them.
            trained: all parameters after local training; the private ones are left behind here.
            weight: the client's number of training examples (or 1).
            rows: by name, which rows of a federated table both hold, ascending; a table that is absent is whole.
        """
        deltas = {
            name: (trained[name] - start if start.is_floating_point() else trained[name].clone()).detach()
            for name, start in received.items()
            if not self.is_private(name)
        }
        cut = {name: numbers for name, numbers in (rows or {}).items() if name in deltas}
        return Upload(deltas, weight, cut, _key=Upload._made_by_split)

    def arrived(self, deltas: Params, weight: float, rows: Params) -> Upload:
        """Return an upload that ``upload`` made in another process, put together again from its parts.

        Raises:
            SplitError: a private name is among them.
        """
        left = self.private_names(deltas)
        if left:
            raise SplitError(f"The private {left[0]!r} left a client.")
        return Upload(deltas, weight, rows, _key=Upload._made_by_split)

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
        deltas: trained − received for every federated name (integer counters: the trained value); what an upload
            chain made of them, once it was encoded.
        weight: the client's number of training examples.
        rows: by name, the numbers of the rows that ``deltas`` holds of a table, (rows,) int64, ascending; a table
            that is absent is whole.
    """

    deltas: Params
    weight: float
    rows: Params = field(default_factory=dict)
    _key: object = None
    _made_by_split: ClassVar[object] = object()

    def __post_init__(self) -> None:
        if self._key is not Upload._made_by_split:
            raise SplitError(
                "An Upload is made by Split.upload alone, so that no private name can leave by accident."
            )

    @property
    def nbytes(self) -> int:
        """The bytes that leave the client: values and row numbers."""
        return nbytes(self.deltas) + nbytes(self.rows)

    def but(self, deltas: Params) -> Upload:
        """Return this upload in another form: encoded or decoded by an upload chain."""
        return replace(self, deltas=deltas)

    def cut(self, received: Mapping[str, Tensor]) -> Params:
        """Return the received parameters, tables cut to the rows that this upload holds."""
        return {n: v[self.rows[n].to(v.device)] if n in self.rows else v for n, v in received.items()}

    def cut_bytes(self, received: Mapping[str, Tensor]) -> int:
        """Return the bytes of the received parameters, tables cut to the rows that this upload holds."""
        others = ((received[n], len(rows)) for n, rows in self.rows.items())
        return nbytes(received) - sum((len(table) - kept) * table[:1].nbytes for table, kept in others)


def check_upload(upload: Upload, received: Mapping[str, Tensor], client: str) -> None:
    """Check a (decoded) upload's names, shapes, dtypes, rows and finiteness against what the server sent.

    Raises:
        UploadError: names the client and the first fault.
    """
    check_rows(upload, received, client)
    fault = difference_of_names(received, upload.deltas)
    if not fault:
        for name, start in received.items():
            got = upload.deltas[name]
            wanted = start.shape if name not in upload.rows else (len(upload.rows[name]), *start.shape[1:])
            if tuple(got.shape) != tuple(wanted) or got.dtype != start.dtype:
                fault = f"{name!r} should be {tuple(wanted)} {start.dtype}, is {tuple(got.shape)} {got.dtype}"
                break
    if not fault and (bad := nonfinite(upload.deltas)) is not None:
        fault = f"{bad!r} holds a NaN or an infinity"
    if not fault and not 0 <= upload.weight < float("inf"):
        fault = f"its weight is {upload.weight}"
    if fault:
        raise _refused(client, fault)


def check_rows(upload: Upload, received: Mapping[str, Tensor], client: str) -> None:
    """Check that an upload's rows lie in tables that were sent, before they are used.

    Raises:
        UploadError: names the client and the first fault.
    """
    fault = _fault_of_rows(upload.rows, received)
    if fault:
        raise _refused(client, fault)


def _refused(client: str, fault: str) -> UploadError:
    return UploadError(f"The upload of client {client!r} was refused: {fault}.")


def _fault_of_rows(rows: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> str:
    for name, numbers in rows.items():
        if name not in received:
            return f"it names rows of {name!r}, which was not sent"
        if received[name].dim() == 0:
            return f"it names rows of {name!r}, which is a number"
        if numbers.dim() != 1 or numbers.dtype != torch.int64:
            return (
                f"the rows of {name!r} should be a list of int64, are {tuple(numbers.shape)} {numbers.dtype}"
            )
        inside = len(numbers) == 0 or (int(numbers[0]) >= 0 and int(numbers[-1]) < len(received[name]))
        if not inside or bool((numbers.diff() <= 0).any()):
            return f"the rows of {name!r} should ascend within 0 … {len(received[name]) - 1}"
    return ""
