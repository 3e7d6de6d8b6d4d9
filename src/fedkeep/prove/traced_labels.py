"""Labels that travel with tensors: each storage knows what its values may depend on, and by which operations.

``Tracer`` sees every operation that PyTorch runs in the thread that entered it, those of backward passes too. Methods
of tensors by which numbers leave for Python (``.item()``, numpy, addresses) and scripts of ``torch.jit`` it sees
whoever calls them, Python or C code such as ``map``. The rest of ``rules.CROSSINGS`` (DLPack's capsules, threads,
processes, a generator's state, hooks of gradient functions) and native code of other packages it sees where Python
calls it. ``Makers`` sees tensors that are made of Python's values; ``Shared`` watches memory that Python's code has too.

Labels stand with storages, not with tensors, so views, ``.data`` and ``set_`` hide nothing. Where nothing is known, the
label is ``OUTSIDE``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from fedkeep.core.modes import EagerMode
from fedkeep.kernels import native
from fedkeep.prove.rules import (
    CROSSINGS,
    HIDDEN,
    OPENS,
    OUTSIDE,
    QUIET,
    READERS,
    ROW_NUMBERS,
    RUNS,
    SPARSE,
    TABLES,
    UNWRITTEN,
    WHOLE,
    WRITES,
    foreign,
    hiding,
    rule_of,
    short,
)
from fedkeep.prove.sites import CHANCE, DATA, SITES, asked_by, native_module, others, own, site_of, where


@dataclass(frozen=True, slots=True, eq=False)
class LabelNode:
    """What a storage holds.

    Attributes:
        what: the operation, and the module that it was computed in; of a beginning its label.
        labels: a bit for each label.
        parents: what it was made of.
    """

    what: str
    labels: int
    parents: tuple[LabelNode, ...] = ()

    def path(self, label: int) -> list[str]:
        """Return the operations by which a label came here, from its beginning."""
        found, node = [self.what], self
        while (before := next((p for p in node.parents if p.labels & label), None)) is not None:
            node = before
            if node.what != found[-1]:
                found.append(node.what)
        return found[::-1]


@dataclass(frozen=True)
class Crossing:
    """Numbers that left tensors for Python, or came from there.

    Attributes:
        node: what they may depend on.
        what: how they left.
        site: the function, with its module.
        told: the channel that they go to, or empty: nobody says where they go.
    """

    node: LabelNode
    what: str
    site: str
    told: str = ""


def made(what: str, parents: tuple[LabelNode, ...], more: int) -> LabelNode:
    """Return what is known of something that was made of parents; ``more``: labels of its own."""
    labels = more
    for parent in parents:
        labels |= parent.labels
    return LabelNode(what, labels, parents)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operation's argument or result."""
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def flat(value: Any) -> Iterator[Any]:
    """Yield what is in sequences of any kind, at any depth."""
    alone = (Tensor, np.ndarray, np.generic, str, bytes, dict)
    if not isinstance(value, alone) and hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        for each in value:
            yield from flat(each)
    else:
        yield value


def at(value: Any, place: int | None, wide: int) -> Any:
    """Return what of an argument belongs to a place of lists."""
    if place is None or not isinstance(value, list | tuple):
        return value
    if value and all(isinstance(v, list | tuple) for v in value):
        return [at(v, place, wide) for v in value]
    return value[place] if len(value) == wide else value


def writes(name: str, given: Mapping[str, Any]) -> bool:
    """Tell whether an operation writes: batch statistics are written in training alone."""
    return name not in HIDDEN or bool(given.get("training", given.get("use_input_stats", True)))


SHARE = {
    "numpy",
    "data_ptr",
    "untyped_storage",
    "_to_dlpack",
    "to_dlpack",
    "_to_dlpack_versioned",
    "_to_dlpack_unversioned",
}
"""Functions that hand out a tensor's memory, not a copy of it."""


class Shared:
    """Storages whose memory somebody else has, and by what."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: Tensor, what: str) -> None:
        """Note that a tensor's memory was handed out, or came from elsewhere."""
        storage = tensor.untyped_storage()
        self._by[storage._cdata] = StorageWeakRef(storage), what  # type: ignore[no-untyped-call]

    def by(self, tensor: Tensor) -> str:
        """Return by what a tensor's memory is shared; empty: by nothing that was seen."""
        found = self._by.get(tensor.untyped_storage()._cdata)
        return "" if found is None else found[1]


def held(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a sparse one's places and values; a tensor with a storage of its own is itself."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def lent(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is an array's or a file's: PyTorch cannot make it larger."""
    return not tensor.untyped_storage().resizable()


MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, Tensor.new_tensor}


class Makers(TorchFunctionMode):
    """Sees what tensors are made of that come from Python, and where numbers leave them, whoever calls."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Say whether a new tensor holds constants, other tensors, or an array that nobody declared.

        A crossing that Python called has been noted already (``Tracer._profile``): noted again, it is the same one.
        """
        tracer, given = self.tracer, (args, *(kwargs or {}).values())
        before = tracer.fresh, tracer.given, tracer.doing
        name = str(getattr(func, "__name__", ""))
        tracer.fresh, tracer.given, tracer.doing = None, given, name
        if func in MAKERS and not isinstance(args[0] if args else None, Tensor):
            place = where(skip=False)[1:]
            hidden = place not in SITES and any(isinstance(v, np.ndarray | np.generic) for v in flat(given))
            with torch._C.DisableTorchFunction():
                parts = tracer.parts(given)
            what = "tensor" if parts else "a constant"
            what = f"an array that nobody declared, in {'.'.join(place)}" if hidden else what
            tracer.fresh = made(what, parts, OUTSIDE if hidden else 0)
        elif name in CROSSINGS and not own(sys._getframe(1)):
            tracer.called(name, args[0] if args else None)
        elif name in READERS:
            sizes = (*args[1:2], *(kwargs or {}).values())
            tracer.read(name, [v for v in flat(sizes) if isinstance(v, Tensor) and not v.is_floating_point()])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            tracer.fresh, tracer.given, tracer.doing = before


def called_back(frame: FrameType | None) -> bool:
    """Tell whether PyTorch has called other code from inside a function of its own, where ``Makers`` sees nothing."""
    while frame is not None and frame.f_code is not Makers.__torch_function__.__code__:
        if not f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "contextlib.", "fedkeep.prove.")):
            return True
        frame = frame.f_back
    return False


HOOKS = (
    "a proof does not follow hooks on saved tensors, which torch.utils.checkpoint sets, for instance. Prove the model "
    "without them, as it computes the same"
)
SCRIPTS = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
"""They read tensors unseen: within, neither Python nor ``Makers`` is asked."""
WATCHED = CROSSINGS | OPENS | RUNS | READERS
KERNEL = native.call.__code__


@dataclass(eq=False)
class Tracer(EagerMode):
    """Gives every storage labels while it is entered.

    Attributes:
        names: of the labels, by their place.
        owners: of labels that are a client's, its id.
        crossings: numbers that left for Python, the first of each site and label.
    """

    module: nn.Module
    names: list[str] = field(default_factory=lambda: ["a tensor that nobody declared"])
    owners: dict[str, str] = field(default_factory=dict)
    crossings: dict[tuple[str, str, int], Crossing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._nodes: dict[int, tuple[StorageWeakRef, LabelNode]] = {}
        self._shared = Shared()
        self._addresses: dict[int, Tensor] = {}
        self._inside: list[str] = []
        self._of = {id(layer): name for name, layer in self.module.named_modules()}
        self.fresh: LabelNode | None = None
        self.given: tuple[Any, ...] | None = None
        self.doing = ""
        self._codes: dict[int, tuple[CodeType, dict[str, Any], bool, bool]] = {}
        self._makers, self._again = Makers(self), list[FrameType]()

    @property
    def storages(self) -> int:
        """How many storages have been labelled."""
        return len(self._nodes)

    # --- labels

    def bit(self, name: str) -> int:
        """Return the bit of a label, a new one at first."""
        if name not in self.names:
            self.names.append(name)
        return 1 << self.names.index(name)

    def own(self, kind: str, owner: str) -> str:
        """Return the label of what is a client's."""
        label = f"{kind} of {owner}"
        self.owners[label] = owner
        return label

    def bits(self, *kinds: str) -> int:
        """Return the bits of all labels of some kinds, patterns, whosever they are."""
        named = enumerate(self.names)
        plain = ((k, n.removesuffix(f" of {self.owners.get(n)}")) for k, n in named)
        return sum(1 << k for k, n in plain if any(fnmatchcase(n, kind) for kind in kinds))

    def words(self, labels: int) -> list[str]:
        """Return the names of labels."""
        return [name for place, name in enumerate(self.names) if labels >> place & 1]

    def node(self, tensor: Tensor) -> LabelNode | None:
        """Return what is known of a tensor's storages; None: nothing of one of them."""
        if tensor.layout is torch.strided:
            known = self._nodes.get(tensor.untyped_storage()._cdata)
            return None if known is None else known[1]
        found = [self._nodes.get(part.untyped_storage()._cdata) for part in held(tensor)]
        nodes = tuple(dict.fromkeys(each[1] for each in found if each is not None))
        return None if None in found else nodes[0] if len(nodes) == 1 else made("sparse", nodes, 0)

    def put(self, tensor: Tensor, node: LabelNode) -> None:
        """Say what a tensor's storages hold."""
        for storage in (part.untyped_storage() for part in held(tensor)):
            # The weak reference keeps the storage's number from being given to another one.
            self._nodes[storage._cdata] = StorageWeakRef(storage), node  # type: ignore[no-untyped-call]

    def begin(self, tensor: Tensor, label: str) -> None:
        """Let a label begin at a tensor; an empty one is of what anybody may know."""
        old = self.node(tensor)
        node = LabelNode(label or "a constant", self.bit(label) if label else 0)
        more = old is not None and old.labels & ~node.labels
        self.put(tensor, node if not more else LabelNode(label, node.labels | old.labels, (old, node)))  # type: ignore[union-attr, arg-type]

    def known(self, tensor: Tensor, func: Any) -> LabelNode:
        """Return what is known of a tensor that an operation is given, and note where nothing is."""
        node = self.node(tensor)
        if node is None and tensor.layout is not torch.strided:
            return made("sparse", tuple(self.known(part, func) for part in held(tensor)), 0)
        if node is None:
            self._came(tensor)
            node = LabelNode(
                f"a tensor that nobody declared, given to {short(func)} in {'.'.join(where()[1:])}", OUTSIDE
            )
            self.put(tensor, node)
        return node

    def _came(self, tensor: Tensor) -> None:
        """Note where a tensor's memory is an array's, which Python's code may still have."""
        if lent(tensor) and (place := where()[1:]) not in SITES:
            self._shared.add(tensor, f"memory of an array, given to PyTorch in {'.'.join(place)}, written")

    def _told(self, rows: LabelNode) -> LabelNode:
        """Return what is known of numbers of rows, which every run tells, beside the examples that have them."""
        return LabelNode("the rows of a table", rows.labels & ~self.bits(DATA), (rows,))

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and label what it returns and writes."""
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            with torch._C.DisableTorchFunction():
                for kind in {*types} - {Tensor, nn.Parameter}:
                    self.cross(LabelNode("", OUTSIDE), f"{kind.__name__}.__torch_dispatch__")
                run = self._parts if rule_of(func).whole else self._run
                return run(func, args, kwargs or {})
        finally:
            sys.setprofile(profile)

    def _parts(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operations that one is made of, which inference mode hides."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return func._op_dk(WHOLE, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        rule = rule_of(func)
        name = rule.name
        if name in ("lift_fresh", "lift_fresh_copy"):
            self._lifted(args[0])
        given = {**dict(zip(rule.arguments, args, strict=False)), **kwargs}
        inputs = [t for value in given.values() for t in tensors(value)]
        before = {id(t): self.known(t, func) for t in inputs}
        if name in ROW_NUMBERS and where()[1].startswith(TABLES):
            for t in tensors(given[ROW_NUMBERS[name]]):
                before[id(t)] = self._told(before[id(t)])
        for tensor in inputs:
            if isinstance(tensor.grad_fn, BackwardCFunction) and foreign(tensor.grad_fn):
                self.cross(LabelNode("", OUTSIDE), f"the backward pass of {type(tensor.grad_fn).__name__}")
        parents = () if rule.shapes else tuple(dict.fromkeys(before.values()))
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.cross(made("", parents, 0), f"an error of {name}")
            raise
        if rule.unknown:
            self.cross(LabelNode("", OUTSIDE), rule.unknown)
        what = f"{name} in {self._inside[-1]}" if self._inside else name
        random = self.bit(CHANCE) if rule.random else 0
        mask = (
            any(t.dtype in (torch.bool, torch.uint8) for t in tensors(given.get("indices")))
            and name == "index"
        )
        sparse = name not in SPARSE and any(t.layout is not torch.strided for t in tensors(out))
        if rule.tells or mask or sparse:
            self.cross(made("", parents, 0), name)
        if name == "_pack_padded_sequence" and (labels := made("", parents, 0).labels) & ~self.bits(DATA):
            self.cross(LabelNode("", labels, parents), name)
        if name == "set_":
            return out
        wide = (
            max((len(v) for v in given.values() if isinstance(v, list | tuple)), default=0)
            if rule.rows
            else 0
        )
        for place in range(wide) if rule.rows else (None,):
            mine = (
                parents
                if place is None
                else tuple(
                    dict.fromkeys(before[id(t)] for v in given.values() for t in tensors(at(v, place, wide)))
                )
            )
            node = made(what, mine, random)
            if UNWRITTEN.match(name) and self._asked_for(out):
                node = LabelNode(
                    f"memory of {name}, which others have written before, in {'.'.join(where()[1:])}", OUTSIDE
                )
            for argument in rule.written if writes(name, given) else ():
                for tensor in tensors(at(given.get(argument), place, wide)):
                    self._add(tensor, node)
            for tensor in (part for t in tensors(at(out, place, wide)) for part in held(t)):
                if self.node(tensor) is None:
                    self.put(tensor, node)
        return out

    def _asked_for(self, out: Any) -> bool:
        """Tell whether other code asked for memory as it is; PyTorch and fedkeep write what they ask for."""
        frame = where(skip=False)[0]
        by_name = not self.doing or UNWRITTEN.match(self.doing) is not None
        return by_name and frame is not None and others(frame) and any(t.numel() for t in tensors(out))

    def _add(self, written: Tensor, node: LabelNode) -> None:
        for tensor in held(written):
            if how := self._shared.by(tensor):
                self.cross(node, how)
            old = self.node(tensor)
            if old is None or node.labels & ~old.labels:
                new = old is None or old in node.parents
                self.put(tensor, node if new else made(node.what, (*node.parents, old), 0))  # type: ignore[arg-type]

    def _lifted(self, tensor: Tensor) -> None:
        """Label a tensor that was made of Python's numbers, of other tensors or of an array."""
        self._came(tensor)
        if self.given is not None and called_back(sys._getframe()):
            self.put(tensor, LabelNode("a tensor made in a function that PyTorch called", OUTSIDE))
        elif self.fresh is not None:
            self.put(tensor, self.fresh)
        elif self.given is not None:
            parts = self.parts(self.given)
            self.put(tensor, made("tensor" if parts else "a constant", parts, 0))
        elif (place := where(skip=False)[1:])[0].startswith("torch.") or place in SITES:
            self.put(tensor, LabelNode("a constant", 0))

    def parts(self, values: Any) -> tuple[LabelNode, ...]:
        """Return what is known of tensors among values of Python."""
        found = [v for v in flat(values) if isinstance(v, Tensor)]
        return tuple(dict.fromkeys(self.node(v) or LabelNode("", OUTSIDE) for v in found))

    # --- Python

    def cross(self, node: LabelNode, what: str) -> None:
        """Note that numbers leave tensors for Python, where nothing says that they go nowhere."""
        frame, module, name = where()
        site = site_of(module, name, what)
        if not node.labels:
            return
        if site is not None and site.only and node.labels & ~self.bits(*site.only):
            site = None
        if site is not None and (not site.told or (frame is not None and site.unless(frame))):
            return
        told = site.told if site is not None and not node.labels & OUTSIDE else ""
        text = f"{module}.{name}"
        self.crossings.setdefault((text, what, node.labels), Crossing(node, what, text, told))

    def read(self, name: str, sizes: Sequence[Tensor]) -> None:
        """Note that a function reads numbers in C++; the lengths of examples are no values."""
        with torch._C.DisableTorchFunction():
            node = made("", self.parts(sizes), 0)
        if name == "tensor_split" or node.labels & ~self.bits(DATA):
            self.cross(node, name)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if arg.__name__ in WATCHED or not native_module(arg.__module__):
                self._c_call(frame, arg, arg.__name__)
        elif event == "call":
            code = frame.f_code
            known = self._codes.get(id(code))
            if known is None or known[1] is not frame.f_globals:
                known = self._codes[id(code)] = code, frame.f_globals, others(frame), True
            if known[2]:
                self._others_call(frame, new=known[3])
            elif code is KERNEL:
                self._kernel(**{n: frame.f_locals[n] for n in ("kernel", "backward", "words")})
        elif event == "return" and self._again and self._again[-1] is frame:
            self._again.pop()
            self._makers.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _c_call(self, frame: FrameType, arg: Any, name: str) -> None:
        """Note a call of a function that is not Python's, where it is one to be noted."""
        if own(frame):
            return
        if name in CROSSINGS:
            self.called(name, getattr(arg, "__self__", None))
        elif name in OPENS and asked_by(frame, QUIET):
            self.cross(LabelNode("", OUTSIDE), f"{name}, of a file or what is like one,")
        elif name in RUNS and arg.__module__ == "builtins" and others(frame) and asked_by(frame, QUIET):
            self.cross(LabelNode("", OUTSIDE), f"{name}, which runs other code,")
        elif name in READERS and self.given is not None and called_back(frame):
            self.cross(LabelNode("", OUTSIDE), f"{name} in a function that PyTorch called")
        elif not native_module(arg.__module__):
            self.cross(LabelNode("", OUTSIDE), f"native code of {arg.__module__}")

    def _others_call(self, frame: FrameType, *, new: bool) -> None:
        """Look at other code that begins to run; ``new``: it has not run before, or with other names of its module."""
        code = frame.f_code
        if new or code.co_freevars:  # what free names stand for may be another thing each time
            self._codes[id(code)] = code, frame.f_globals, True, False
            if code.co_name != "<module>":  # what is imported does nothing yet
                cells = [frame.f_locals[n] for n in code.co_freevars if n in frame.f_locals]
                name = hiding(code, frame.f_globals, cells)
                if name and asked_by(frame, QUIET):
                    self.cross(LabelNode("", OUTSIDE), f"{name}, which hides what is done,")
        if self.given is not None and self._makers not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            self._makers.__enter__()  # type: ignore[no-untyped-call]  # PyTorch had set it aside
            self._again.append(frame)

    def called(self, name: str, owner: Any) -> None:
        """Note that a function was called by which values leave tensors unseen."""
        if isinstance(owner, np.ndarray | np.generic):
            return
        with torch._C.DisableTorchFunction():
            if not isinstance(owner, Tensor):
                self.cross(LabelNode("", OUTSIDE), name)
                return
            if name == "data_ptr":
                self._addresses[owner.data_ptr()] = owner
            if name in SHARE and site_of(*(place := where()[1:]), name) is None:
                self._shared.add(owner, f"memory that {name} handed out in {'.'.join(place)}, written")
            self.cross(self.node(owner) or LabelNode("", OUTSIDE), name)

    def _kernel(self, kernel: str, backward: bool, words: Sequence[int]) -> None:
        """Label what a native kernel writes."""
        fields = dict(zip(native._FIELDS[kernel], words, strict=True))
        given = {n: self._addresses[w] for n, w in fields.items() if w and w in self._addresses}
        known = {n: self.known(t, kernel) for n, t in given.items()}
        if kernel == "rows" and "used" in known:
            known["used"] = self._told(known["used"])
        nodes = tuple(dict.fromkeys(known.values()))
        layer = f" in {self._inside[-1]}" if self._inside else ""
        node = made(f"the kernel {kernel}{' backward' if backward else ''}{layer}", nodes, 0)
        for name, tensor in given.items():
            if name.partition("[")[0] in WRITES[kernel, backward]:
                self._add(tensor, node)
        self._addresses.clear()

    # --- entering

    def __enter__(self) -> Self:
        self._held = ExitStack()
        self._held.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(HOOKS))
        self._held.enter_context(self._makers)
        for kind in SCRIPTS:
            called = vars(kind)["__call__"]
            self._held.callback(setattr, kind, "__call__", called)
            setattr(kind, "__call__", self._script(called))  # noqa: B010
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        self._held.callback(before.remove)
        self._held.callback(after.remove)
        self._held.callback(sys.setprofile, sys.getprofile())
        super().__enter__()  # type: ignore[no-untyped-call]
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._held.close()

    def _script(self, called: Callable[..., Any]) -> Callable[..., Any]:
        def noted(script: Any, *args: Any, **kwargs: Any) -> Any:
            self.cross(LabelNode("", OUTSIDE), f"the script {script.name}")
            return called(script, *args, **kwargs)

        return noted

    def _enter(self, layer: nn.Module, given: Any) -> None:
        self._inside.append(self._of.get(id(layer)) or type(layer).__name__)

    def _leave(self, layer: nn.Module, given: Any, out: Any) -> None:
        if self._inside:
            self._inside.pop()
