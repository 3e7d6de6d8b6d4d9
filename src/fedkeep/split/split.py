"""The split: which parameters are private, and the only way for the others to leave a client.

Source: FURL, §3.1 (every model is divided into federated parameters w_f and private parameters w_p).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedkeep.core.errors import SplitError, UploadError, refused_upload
from fedkeep.core.net import every_tensor, tensors_of
from fedkeep.core.params import CLIENT, Params, difference_of_names, is_state, nbytes, nonfinite
from fedkeep.split.halves import Half, Halves, divide, matches


@dataclass(frozen=True, init=False)
class Split:
    """Glob patterns that name the private parameters and buffers, and those to freeze; the rest is federated.

    Parameters that require no gradient and buffers that training does not update are frozen without being named:
    ``halves`` says of a module's tensors which is which.

    Args:
        private: patterns such as ``"user"`` or ``"head.*"``, matched against the module's own names
            (case-sensitive). Empty: nothing is private. ``"*"``: everything is private that is not frozen.
        frozen: patterns of what is neither trained nor changed, e.g. ``"encoder.embedding.*"``.

    Raises:
        SplitError: a pattern is no text.
    """

    private: tuple[str, ...]
    frozen: tuple[str, ...]

    def __init__(self, private: str | Sequence[str] = (), frozen: str | Sequence[str] = ()) -> None:
        for name, given in (("private", private), ("frozen", frozen)):
            patterns = (
                tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
            )
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise SplitError(
                        "The patterns of {name} must be texts, e.g. 'head.*'; got {got!r}.",
                        name=name,
                        got=pattern,
                    )
            object.__setattr__(self, name, patterns)

    def halves(self, module: nn.Module) -> Halves:
        """Return a module's three halves.

        Raises:
            SplitError: a pattern matches nothing, or only frozen tensors; or a tensor is named private and frozen.
        """
        return divide(module, self.private, self.frozen)

    def is_private(self, name: str) -> bool:
        """Tell whether a private pattern matches ``name``; a client's state is private, the server's is not."""
        return stays(name, self.private)

    def is_frozen(self, name: str) -> bool:
        """Tell whether a pattern of ``frozen`` matches ``name``."""
        return matches(name, self.frozen)

    def private_names(self, names: Iterable[str]) -> list[str]:
        """Return the private ones of ``names``, in their order."""
        return list(_private(tuple(names), self.private))

    def federated(self, params: Mapping[str, Tensor]) -> Params:
        """Return the federated half of ``params``."""
        stay = frozenset(_private(tuple(params), self.private))
        return {name: value for name, value in params.items() if name not in stay}

    def personal(self, params: Mapping[str, Tensor]) -> Params:
        """Return the private half of ``params``."""
        return {name: params[name] for name in _private(tuple(params), self.private)}

    def merge(self, federated: Mapping[str, Tensor], private: Mapping[str, Tensor]) -> Params:
        """Return both halves together.

        Raises:
            SplitError: a name stands in the wrong half.
        """
        wrong = self.private_names(federated) + list(self.federated(private))
        if wrong:
            raise SplitError("These names stand in the wrong half of the split: {wrong}.", wrong=wrong)
        return {**federated, **private}

    def upload(
        self,
        received: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        weight: float,
        rows: Mapping[str, Tensor] | None = None,
        spare: AbstractSet[str] = frozenset(),
    ) -> Upload:
        """Return what leaves the client: the change of every federated parameter, and the client's weight.

        Args:
            received: federated parameters as the server sent them.
            trained: all parameters after local training; the private ones are left behind here.
            weight: the client's number of training examples (or 1).
            rows: by name, which rows of a federated table both hold, ascending; a table that is absent is whole.
            spare: names of trained values that nobody needs afterwards: their changes take their place in memory.
        """
        names = [n for n in self.federated(received) if not (self.frozen and self.is_frozen(n))]
        whole = [n for n in names if not received[n].is_floating_point()]
        deltas = {n: trained[n] for n in names} | {n: trained[n].clone() for n in whole}
        with torch.no_grad():
            for change, of in ((torch._foreach_sub_, spare), (torch._foreach_sub, deltas.keys() - spare)):
                if some := [n for n in names if n in of and n not in whole]:
                    values = [deltas[n] for n in some]
                    changes = change(values, [received[n] for n in some])  # None: in their place
                    deltas.update(zip(some, changes or values, strict=True))
        cut = {name: numbers for name, numbers in (rows or {}).items() if name in deltas}
        return Upload(deltas, weight, cut, _key=Upload._made_by_split)

    def arrived(self, deltas: Params, weight: float, rows: Params) -> Upload:
        """Return an upload that ``upload`` made in another process, put together again from its parts.

        Raises:
            UploadError: a private name is among them.
        """
        left = self.private_names(deltas)
        if left:
            raise UploadError("An upload was refused: the private {name!r} is in it.", name=left[0])
        return Upload(deltas, weight, rows, _key=Upload._made_by_split)

    def check(self, module: nn.Module) -> None:
        """Check the split against a module: patterns match, and no storage is shared across the halves.

        Raises:
            SplitError: as for ``halves``, or tensors of different halves are tied.
        """
        halves, tensors = self.halves(module), every_tensor(module)
        first = {id(tensors[name]): name for name in tensors_of(module)}
        owners: dict[int, str] = {}
        for name, value in tensors.items():
            if value.numel() == 0:
                continue
            other = owners.setdefault(value.untyped_storage().data_ptr(), name)
            here, there = (halves.half(first[id(tensors[n])]) for n in (name, other))
            if value is tensors[other]:  # one tensor under two names is what each of them says, or an error
                here, there = self._said(name, here), self._said(other, there)
            if here == there:
                continue
            (mine, own), (rest, theirs) = sorted(
                [(here, name), (there, other)], key=lambda h: h[0] != "private"
            )
            if mine == "private":
                raise SplitError(
                    "Private {own!r} and {rest} {theirs!r} of {module_type} share one storage (tied weights), so "
                    "the private values would leave with the {rest} ones. Untie them, or put both in the same "
                    "half.",
                    own=own,
                    rest=rest,
                    theirs=theirs,
                    module_type=type(module).__name__,
                )
            if value is tensors[other]:
                raise SplitError(
                    "{other!r} and {name!r} of {module} are one tensor (tied weights), and only "
                    "{named!r} is named frozen. Name both in frozen, or neither.",
                    other=other,
                    name=name,
                    module=type(module).__name__,
                    named=own if mine == "frozen" else theirs,
                )

    def _said(self, name: str, otherwise: Half) -> Half:
        if self.is_frozen(name):
            return "frozen"
        if self.is_private(name):
            return "private"
        return "federated" if otherwise == "private" else otherwise

    def table(self, module: nn.Module) -> list[dict[str, object]]:
        """Return a row ``{name, shape, half, kind, bytes}`` for every parameter and buffer; tied ones once.

        ``half`` is ``"private"``, ``"federated"`` or ``"frozen"``; ``kind`` is ``"parameter"`` or ``"buffer"``.

        Raises:
            SplitError: as for ``check``: a model that no run takes has no table.
        """
        self.check(module)
        halves = self.halves(module)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        return [
            {
                "name": name,
                "shape": list(value.shape),
                "half": halves.half(name),
                "kind": "parameter" if name in parameters else "buffer",
                "bytes": value.numel() * value.element_size(),
            }
            for name, value in tensors_of(module).items()
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

    def but(self, deltas: Params, rows: Params | None = None) -> Upload:
        """Return this upload in another form: encoded or decoded by an upload chain, or as its reduction sums it."""
        return replace(self, deltas=deltas, rows=self.rows if rows is None else rows)

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
            if got.shape != wanted or got.dtype != start.dtype:
                fault = f"{name!r} should be {tuple(wanted)} {start.dtype}, is {tuple(got.shape)} {got.dtype}"
                break
    if not fault and (bad := nonfinite(upload.deltas)) is not None:
        fault = f"{bad!r} holds a NaN or an infinity"
    if not fault and not 0 <= upload.weight < float("inf"):
        fault = f"its weight is {upload.weight}"
    if fault:
        raise refused_upload(client, "{fault}.", fault=fault)


def check_rows(upload: Upload, received: Mapping[str, Tensor], client: str) -> None:
    """Check that an upload's rows lie in tables that were sent, before they are used.

    Raises:
        UploadError: names the client and the first fault.
    """
    fault = _fault_of_rows(upload.rows, received)
    if fault:
        raise refused_upload(client, "{fault}.", fault=fault)


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


@lru_cache(maxsize=1 << 14)
def stays(name: str, private: tuple[str, ...]) -> bool:
    """Tell whether a name belongs to a client, given the patterns of private names."""
    return name.startswith(CLIENT) if is_state(name) else matches(name, private)


@lru_cache(maxsize=1 << 10)  # it is asked of every client, and the names are a model's
def _private(names: tuple[str, ...], private: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if stays(name, private))
