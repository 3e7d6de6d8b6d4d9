"""Optimisers as values: an ``init``/``update`` pair on parameters, equal to ``torch.optim`` step by step.

One implementation serves the local step of a client, centralised training and the server (FedOpt).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedkeep.core.arguments import telling_arguments
from fedkeep.core.errors import ConfigError, check_choice, check_range, did_you_mean
from fedkeep.core.params import Params

Kind = Literal["sgd", "adam", "adamw", "adagrad"]
Schedule = Literal["constant", "linear", "cosine"]


class UsualRate(float):
    """A rate that nobody named: where plain SGD trains a model, the usual one for it takes its place."""


class _ParameterGroup(NamedTuple):
    """Parameters of one rate and decay: names, values and slopes side by side; and lists that may not be alike."""

    names: list[str]
    values: list[Tensor]
    slopes: list[Tensor]
    rate: float
    decay: float
    unsure: list[list[Tensor]]


@dataclass(frozen=True)
class Optimizer:
    """SGD, Adam, AdamW or Adagrad with a learning rate per name pattern.

    Attributes:
        kind: ``sgd``, ``adam``, ``adamw`` or ``adagrad``.
        learning_rate: the rate of every parameter that no pattern names. Where nobody names it, a phase of SGD takes
            the rate that is usual for the model (``methods.usual``).
        rates: (pattern, rate) pairs; the first pattern that matches a parameter's name gives its rate.
        momentum: SGD's momentum (no dampening, not Nesterov).
        weight_decay: L2 penalty (SGD, Adam, Adagrad) or decoupled decay (AdamW): of all parameters, or (pattern, decay)
            pairs; the first pattern that matches a parameter's name gives its decay, and others have none.
        betas, eps: Adam's constants; Adagrad has the second.
        schedule: the rates' course over the run's rounds: ``constant``, ``linear`` or ``cosine`` to zero.
        bounds: (pattern, (low, high)) pairs: values are brought back into [low, high] after every step.
    """

    kind: Kind = "sgd"
    learning_rate: float = UsualRate(0.1)
    rates: tuple[tuple[str, float], ...] = ()
    momentum: float = 0.0
    weight_decay: float | tuple[tuple[str, float], ...] = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Schedule = "constant"
    bounds: tuple[tuple[str, tuple[float, float]], ...] = ()

    def __post_init__(self) -> None:
        check_choice("The kind of an optimiser must be", self.kind, get_args(Kind))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("betas must be two numbers in [0, 1); got {got!r}.", got=self.betas)
        decays = self.weight_decay if isinstance(self.weight_decay, tuple) else (("", self.weight_decay),)
        numbers = [(name, getattr(self, name)) for name in ("learning_rate", "momentum", "eps")]
        numbers += [(f"weight_decay of {p!r}" if p else "weight_decay", value) for p, value in decays]
        numbers += [(f"The learning rate of {pattern!r}", rate) for pattern, rate in self.rates]
        for name, value in numbers:
            if isinstance(value, str | Mapping | tuple):
                raise ConfigError("{name} must be a number; got {got!r}.", name=name, got=value)
            check_range("[0, inf)", **{name: value})
        for pattern, (low, high) in self.bounds:
            if not low <= high:
                raise ConfigError(
                    "The bounds of {pattern!r} must be (low, high); got {got!r}.",
                    pattern=pattern,
                    got=(low, high),
                )
        check_choice("schedule must be", self.schedule, ("constant", "linear", "cosine"))

    def rate(self, name: str) -> float:
        """Return the learning rate of the parameter of this name."""
        if not self.rates:
            return self.learning_rate
        return next((r for pattern, r in self.rates if fnmatchcase(name, pattern)), self.learning_rate)

    def decay(self, name: str) -> float:
        """Return the weight decay of the parameter of this name."""
        decays = self.weight_decay if isinstance(self.weight_decay, tuple) else (("*", self.weight_decay),)
        return next((d for pattern, d in decays if fnmatchcase(name, pattern)), 0.0)

    def check_patterns(self, names: list[str]) -> None:
        """Raise ConfigError if a pattern of ``rates``, ``weight_decay`` or ``bounds`` matches none of ``names``."""
        kinds = [("learning rate", p) for p, _ in self.rates] + [("bounds", p) for p, _ in self.bounds]
        if isinstance(self.weight_decay, tuple):
            kinds += [("weight decay", p) for p, _ in self.weight_decay]
        for kind, pattern in kinds:
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = did_you_mean(pattern, names)
                raise ConfigError(
                    "The {kind} pattern {pattern!r} matches no parameter; they are {names}.{hint}",
                    kind=kind,
                    pattern=pattern,
                    names=names,
                    hint=hint,
                )

    def scale(self, progress: float) -> float:
        """Return the schedule's factor at ``progress``, the finished part of the run in [0, 1)."""
        if self.schedule == "linear":
            return 1.0 - progress
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    @property
    def rests(self) -> bool:
        """Whether a value whose gradient is zero stays where it is, and leaves no trace in the state."""
        return self.kind == "sgd" and not (self.momentum or self.weight_decay or self.bounds)

    @property
    def moments(self) -> int:
        """How many numbers it keeps for each parameter: momentum's is one, Adagrad's too, Adam's are two."""
        return {"sgd": int(self.momentum > 0), "adagrad": 1}.get(self.kind, 2)

    def init(self) -> OptimizerState:
        """Return the state before the first step."""
        return OptimizerState()

    def update(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        state: OptimizerState,
        scale: float = 1.0,
        autograds: bool = False,
    ) -> None:
        """Take one step: change ``params`` and ``state`` in place.

        Args:
            params: values by name; names without a gradient stay as they are.
            grads: gradients by name.
            state: what ``init`` returned, after the steps so far.
            scale: a factor on every rate (the schedule's).
            autograds: whether the gradients are as autograd gave them for these very values: it has seen to it that they
                have their shapes, types and devices.
        """
        groups: dict[tuple[float, float], list[str]] = {}
        if self.rates or isinstance(self.weight_decay, tuple):
            for name in grads:
                groups.setdefault((self.rate(name), self.decay(name)), []).append(name)
        elif grads:
            groups[self.learning_rate, self.weight_decay] = list(grads)
        state.step += 1
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() takes several times as long
        try:
            for (rate, decay), names in groups.items():
                # Contiguous for the fused steps, which save more.
                slopes = list(map(Tensor.contiguous, map(grads.__getitem__, names)))
                steps = {"sgd": self._sgd, "adagrad": self._adagrad}
                values, unsure = list(map(params.__getitem__, names)), [] if autograds else [slopes]
                group = _ParameterGroup(names, values, slopes, rate * scale, decay, unsure)
                steps.get(self.kind, self._adam)(group, state)
            for pattern, (low, high) in self.bounds:
                for name in grads:
                    if fnmatchcase(name, pattern):
                        params[name].clamp_(low, high)
        finally:
            torch._C._set_grad_enabled(before)

    def _sgd(self, group: _ParameterGroup, state: OptimizerState) -> None:
        names, values, slopes, rate, decay, unsure = group
        old = [n for n in names if n in state.first] if self.momentum else []
        moving = [[state.first[n] for n in old]] if old else []
        if len(old) in (0, len(names)) and _alike(values, *unsure, *moving):
            fresh = bool(self.momentum) and not old
            if fresh:
                moving = [[torch.empty_like(v) for v in values]]
                state.first.update(zip(names, moving[0], strict=True))
            torch._fused_sgd_(
                values,
                slopes,
                moving[0] if moving else [],
                weight_decay=decay,
                momentum=self.momentum,
                lr=rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=fresh,
            )
            return
        if decay:
            slopes = list(torch._foreach_add(slopes, values, alpha=decay))
        if self.momentum:
            if old:
                torch._foreach_mul_(moving[0], self.momentum)
                torch._foreach_add_(moving[0], [slopes[names.index(n)] for n in old])
            for name, slope in zip(names, slopes, strict=True):
                if name not in state.first:
                    state.first[name] = slope.clone()
            slopes = [state.first[n] for n in names]
        torch._foreach_add_(values, slopes, alpha=-rate)

    def _adagrad(self, group: _ParameterGroup, state: OptimizerState) -> None:
        names, values, slopes, rate, decay, _ = group
        if decay:
            slopes = list(torch._foreach_add(slopes, values, alpha=decay))
        for name, value in zip(names, values, strict=True):
            if name not in state.first:
                state.first[name] = torch.zeros_like(value)
        squares = [state.first[n] for n in names]
        torch._foreach_addcmul_(squares, slopes, slopes)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(values, slopes, roots, -rate)

    def _adam(self, group: _ParameterGroup, state: OptimizerState) -> None:
        names, values, slopes, rate, decay, unsure = group
        b1, b2 = self.betas
        for name, value in zip(names, values, strict=True):
            if name not in state.first:
                state.first[name], state.second[name] = torch.zeros_like(value), torch.zeros_like(value)
            state.steps[name] = state.steps.get(name, 0) + 1
        first, second = [state.first[n] for n in names], [state.second[n] for n in names]
        if _alike(values, first, second, *unsure):
            taken = {k: _number(k, values[0].device) for k in {state.steps[n] for n in names}}
            fused = torch._fused_adamw_ if self.kind == "adamw" else torch._fused_adam_
            fused(
                values,
                slopes,
                first,
                second,
                [],
                [taken[state.steps[n]] for n in names],
                lr=rate,
                beta1=b1,
                beta2=b2,
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )
            return
        if self.kind == "adamw" and decay:
            torch._foreach_mul_(values, 1.0 - rate * decay)
        elif decay:
            slopes = list(torch._foreach_add(slopes, values, alpha=decay))
        torch._foreach_lerp_(first, slopes, 1.0 - b1)
        torch._foreach_mul_(second, b2)
        torch._foreach_addcmul_(second, slopes, slopes, 1.0 - b2)
        steps = [state.steps[n] for n in names]
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [math.sqrt(1.0 - b2**k) for k in steps])
        torch._foreach_add_(roots, self.eps)
        torch._foreach_addcdiv_(values, first, roots, [-rate / (1.0 - b1**k) for k in steps])


def _number(k: int, device: torch.device) -> Tensor:
    """Return it as the fused kernels take it; a GPU fills it in there, without waiting for a copy from here."""
    if device.type == "cpu":
        return torch.tensor(float(k), dtype=torch.float32)
    return torch.full((), float(k), dtype=torch.float32, device=device)


@dataclass
class OptimizerState:
    """Moments by parameter name; ``tensors`` and ``from_tensors`` carry it through a safetensors file."""

    step: int = 0
    first: Params = field(default_factory=dict)
    second: Params = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)

    def tensors(self) -> Params:
        """Return the state as named tensors."""
        out: Params = {"step": torch.tensor(self.step)}
        for part in ("first", "second"):
            out |= {f"{part}/{name}": t for name, t in getattr(self, part).items()}
        return out | {f"steps/{name}": torch.tensor(k) for name, k in self.steps.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """Return the state that ``tensors`` came from."""
        state = cls(step=int(tensors["step"]))
        for key, value in tensors.items():
            part, _, name = key.partition("/")
            if part == "steps":
                state.steps[name] = int(value)
            elif name:
                getattr(state, part)[name] = value.clone()
        return state


def _alike(values: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether torch's fused steps may take these tensors: they read all of them in the order of memory, unchecked."""
    every = list(itertools.chain(values, *others))
    (kind, cpu), *more = set(map(attrgetter("dtype", "is_cpu"), every))
    devices = () if cpu else set(map(attrgetter("device"), every))
    if more or kind not in (torch.float32, torch.float64) or len(devices) > 1:
        return False
    if any(device.type != "cuda" for device in devices):
        return False
    sizes = {tuple(map(Tensor.numel, tensors)) for tensors in (values, *others)}
    return len(sizes) == 1 and all(map(Tensor.is_contiguous, every))


Bounds = Mapping[str, tuple[float, float]]


def _pairs(rates: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    _check_mapping("rates", rates, "'bias': 0.0")
    return tuple((rates or {}).items())


def _limits(bounds: Bounds | None) -> tuple[tuple[str, tuple[float, float]], ...]:
    _check_mapping("bounds", bounds, "'scale': (0.0, 1.0)")
    return tuple((pattern, (float(low), float(high))) for pattern, (low, high) in (bounds or {}).items())


def _check_mapping(name: str, given: object, example: str) -> None:
    if not isinstance(given, Mapping | None):
        raise ConfigError(
            "{name} must be a dict by patterns of names, e.g. {{{example}}}; got {got!r}.",
            name=name,
            example=example,
            got=given,
        )


def _decays(given: float | Mapping[str, float]) -> float | tuple[tuple[str, float], ...]:
    return tuple(given.items()) if isinstance(given, Mapping) else given


_telling = telling_arguments({"lr": "learning_rate={got}"})


@_telling
def sgd(
    learning_rate: float = 0.1,
    *,
    momentum: float = 0.0,
    weight_decay: float | Mapping[str, float] = 0.0,
    rates: Mapping[str, float] | None = None,
    schedule: Schedule = "constant",
    bounds: Bounds | None = None,
) -> Optimizer:
    """Return SGD: v ← μv + g + λw, w ← w − ηv.

    ``rates`` maps name patterns to their own η, ``weight_decay`` is one λ or maps patterns to theirs; ``bounds`` to (low, high), where values stay (projected gradient).
    """
    return Optimizer(
        "sgd",
        learning_rate,
        _pairs(rates),
        momentum=momentum,
        weight_decay=_decays(weight_decay),
        schedule=schedule,
        bounds=_limits(bounds),
    )


@_telling
def adam(
    learning_rate: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Mapping[str, float] = 0.0,
    decoupled: bool = False,
    rates: Mapping[str, float] | None = None,
    schedule: Schedule = "constant",
    bounds: Bounds | None = None,
) -> Optimizer:
    """Return Adam, or AdamW with ``decoupled=True``; ``rates`` and ``bounds`` as for ``sgd``."""
    kind: Literal["adamw", "adam"] = "adamw" if decoupled else "adam"
    return Optimizer(
        kind,
        learning_rate,
        _pairs(rates),
        weight_decay=_decays(weight_decay),
        betas=betas,
        eps=eps,
        schedule=schedule,
        bounds=_limits(bounds),
    )


@_telling
def adagrad(
    learning_rate: float = 1e-2,
    *,
    eps: float = 1e-10,
    weight_decay: float | Mapping[str, float] = 0.0,
    rates: Mapping[str, float] | None = None,
    schedule: Schedule = "constant",
    bounds: Bounds | None = None,
) -> Optimizer:
    """Return Adagrad: s ← s + g², w ← w − η g / (√s + ε), with g + λw for g; ``rates`` and ``bounds`` as for ``sgd``.

    At the server this is FedAdagrad, good where most of the cohort changes few rows of a table (Reddi et al., Adaptive
    Federated Optimization, arXiv 2003.00295, algorithm 2, with β₁ = 0 and s₀ = 0); ε is its τ.
    """
    return Optimizer(
        "adagrad",
        learning_rate,
        _pairs(rates),
        weight_decay=_decays(weight_decay),
        eps=eps,
        schedule=schedule,
        bounds=_limits(bounds),
    )
