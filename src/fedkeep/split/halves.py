"""The three halves of a model: private, federated, and frozen (neither trained nor changed)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from fedkeep.core.buffers import frozen_changed as frozen_changed
from fedkeep.core.declared import declared
from fedkeep.core.describe import digest
from fedkeep.core.errors import SplitError, did_you_mean
from fedkeep.core.net import every_tensor, tensors_of
from fedkeep.core.params import Params

Half = Literal["private", "federated", "frozen"]


@lru_cache(maxsize=1 << 14)
def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether one of the glob patterns matches ``name``, case and all."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Which tensors of a module are private, federated and frozen; each is exactly one of the three.

    Only names that ``Net.initial`` has: tied tensors stand under their first name, and buffers that are not persistent
    stand in no half: they stay in the module, and are neither kept nor sent.

    Attributes:
        private_names: what a client keeps, in the module's order.
        federated_names: what is trained together.
        frozen_names: what is part of the model, and neither trained, sent back, kept per client, nor averaged.
        trainable: the names of the private and federated *parameters*; the other names of these two are buffers.
    """

    private_names: tuple[str, ...] = ()
    federated_names: tuple[str, ...] = ()
    frozen_names: tuple[str, ...] = ()
    trainable: frozenset[str] = frozenset()

    def private(self, params: Mapping[str, Tensor]) -> Params:
        """Return the private half of ``params``, in the module's order."""
        return {name: params[name] for name in self.private_names if name in params}

    def federated(self, params: Mapping[str, Tensor]) -> Params:
        """Return the federated half of ``params``, in the module's order."""
        return {name: params[name] for name in self.federated_names if name in params}

    def frozen(self, params: Mapping[str, Tensor]) -> Params:
        """Return the frozen half of ``params``, in the module's order."""
        return {name: params[name] for name in self.frozen_names if name in params}

    def half(self, name: str) -> Half:
        """Return where ``name`` stands.

        Raises:
            SplitError: in none of the three.
        """
        if name in self.private_names:
            return "private"
        if name in self.federated_names:
            return "federated"
        if name in self.frozen_names:
            return "frozen"
        everything = [*self.private_names, *self.federated_names, *self.frozen_names]
        raise SplitError(
            "{name!r} stands in no half of the split.{near}", name=name, near=did_you_mean(name, everything)
        )

    def frozen_digest(self, params: Mapping[str, Tensor]) -> str:
        """Return the SHA-256 of the frozen half's names, shapes, types and values: part of a run's identity."""
        return digest(self.frozen(params))


class Frozen:
    """Frozen values, watched: what training writes into them is noticed.

    Args:
        values: by name; they are held, not copied.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        # What was made in inference mode counts no versions, and nothing outside can write into it.
        self.values = {name: value for name, value in values.items() if not value.is_inference()}
        self._versions = {name: value._version for name, value in self.values.items()}

    def changed(self) -> list[str]:
        """Return the names that were written to in place since; writing through ``.data`` is not noticed."""
        return [name for name, value in self.values.items() if value._version != self._versions[name]]

    def check(self, who: str) -> None:
        """Raise SplitError naming who trained and what was changed, if anything was."""
        if names := self.changed():
            raise SplitError("{who}: {why}", who=who, why=frozen_changed(names[0]))


def divide(module: nn.Module, private: Sequence[str], frozen: Sequence[str] = ()) -> Halves:
    """Divide a module's parameters and persistent buffers into the three halves.

    A tensor that a pattern of ``frozen`` matches is frozen, and so is a parameter that requires no gradient. Others are
    private where a pattern of ``private`` matches, else federated. A buffer that training does not update
    (``updated_buffers``) is frozen, unless ``private`` has its very name.

    Raises:
        SplitError: a pattern matches nothing, or only what is frozen for another reason; or a tensor is named both
            private and frozen; or one that is trained is complex.
    """
    tensors = tensors_of(module)
    everything = every_tensor(module)
    kept, still = tuple(private), tuple(frozen)
    for pattern in (*kept, *still):
        if not any(fnmatchcase(name, pattern) for name in everything):
            raise _no_match(module, pattern, everything, "private" if pattern in kept else "frozen")
    for name in everything:
        if matches(name, kept) and matches(name, still):
            mine, theirs = (next(p for p in patterns if fnmatchcase(name, p)) for patterns in (kept, still))
            raise SplitError(
                "{name!r} is named private by {mine!r} and frozen by {theirs!r}. A tensor is one of the two: "
                "narrow a pattern.",
                name=name,
                mine=mine,
                theirs=theirs,
            )
    changing = updated_buffers(module) | set(kept)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    halves: dict[str, str] = {}
    for name, value in tensors.items():
        fixed = not value.requires_grad if name in parameters else name not in changing
        if fixed or matches(name, still):
            halves[name] = "frozen"
        else:
            halves[name] = "private" if matches(name, kept) else "federated"
    _check_private(module, kept, halves, everything)
    _check_real(tensors, halves)
    names = {
        h: tuple(n for n, half in halves.items() if half == h) for h in ("private", "federated", "frozen")
    }
    return Halves(
        private_names=names["private"],
        federated_names=names["federated"],
        frozen_names=names["frozen"],
        trainable=frozenset(n for n in halves if n in parameters and halves[n] != "frozen"),
    )


def updated_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that training updates.

    They are the buffers of normalisation layers that track statistics (batch and instance normalisation: mean, variance
    and counter), the vectors u and v of torch's spectral norms, and those that a module declares as updated
    (``declare``), by their names within it.
    """
    found: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = (
            *([n for n, _ in part.named_buffers(recurse=False)] if isinstance(part, _NormBase) else []),
            *power_vectors(part),
            *declared(part).updated_buffers,
        )
        found |= {f"{prefix}.{name}" if prefix else name for name in own}
    return frozenset(found)


def power_vectors(layer: nn.Module) -> list[str]:
    """Return the names of the vectors that a layer's spectral norm, new or old, iterates in training."""
    if isinstance(layer, _SpectralNorm):
        return [n for n, _ in layer.named_buffers(recurse=False)]
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    return [f"{hook.name}_{vector}" for hook in hooks for vector in "uv"]


def _no_match(module: nn.Module, pattern: str, tensors: Mapping[str, Tensor], half: str) -> SplitError:
    about = {"half": half, "pattern": pattern, "module": type(module).__name__}
    passing = [n for n, _ in module.named_buffers() if n not in tensors and fnmatchcase(n, pattern)]
    if passing:
        return SplitError(
            "The {half} pattern {pattern!r} matches only buffers of {module} that are not persistent ({passing}); these are "
            "neither kept nor sent. Drop the pattern, or register them with persistent=True.",
            **about,
            passing=passing,
        )
    if pattern.startswith("type:"):
        return SplitError(
            "The {half} pattern {pattern!r} names layers by their type, which a method finds in its model. Ask "
            "method.resolved(model).split.",
            **about,
        )
    there = f" Its parameters are {list(tensors)}; a pattern is a name, or one with *."
    layers = dict.fromkeys(f"{name[:i]}.*" for name in tensors for i, sign in enumerate(name) if sign == ".")
    return SplitError(
        "The {half} pattern {pattern!r} matches no parameter of {module}.{instead}{key}",
        **about,
        instead=did_you_mean(pattern, [*tensors, *layers]) or there,
        key=" In a configuration it is method.private." * (half == "private"),
    )


def _check_real(tensors: Mapping[str, Tensor], halves: Mapping[str, str]) -> None:
    for name, value in tensors.items():
        if value.is_complex() and halves[name] != "frozen":
            raise SplitError(
                "{name!r} is trained and complex ({dtype}), which no mean and no optimiser here takes. Keep "
                "torch.view_as_real of it as the parameter, shape {wanted}, and say torch.view_as_complex "
                "in forward.",
                name=name,
                dtype=value.dtype,
                wanted=[*value.shape, 2],
            )


def _check_private(
    module: nn.Module, patterns: Iterable[str], halves: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse patterns that match only frozen tensors, which no client trains."""
    first = {id(tensors[name]): name for name in halves}
    for pattern in patterns:
        names = list(dict.fromkeys(first[id(v)] for n, v in tensors.items() if fnmatchcase(n, pattern)))
        if all(halves[name] == "frozen" for name in names):
            raise SplitError(
                "Split pattern {pattern!r} matches only frozen tensors of {module_type} ({names}), of which "
                "no client has its own: parameters that require no gradient, buffers that training does not "
                "update, or what the split names frozen. Drop the pattern, or let them be trained.",
                pattern=pattern,
                module_type=type(module).__name__,
                names=names,
            )
