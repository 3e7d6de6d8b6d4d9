"""Differential privacy of clients: what a user asks for, and the clipping that it rests on.

Source: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018 (arXiv 1710.06963),
algorithm 1; the adaptive bound: Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021
(arXiv 1905.03871), algorithm 1 and theorem 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import get_args

from torch import Tensor

from fedkeep.core.errors import ConfigError, check_choice, check_range, did_you_mean
from fedkeep.core.params import Params
from fedkeep.kernels.values import exact
from fedkeep.privacy.accounting import Accountant, Release
from fedkeep.privacy.clip_and_noise import norm
from fedkeep.privacy.draws import Draw, RunDraws, SystemDraw


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A bound that follows the clients' norms: C ← C · exp(−rate (b̃ − quantile)).

    b̃ is a noisy share of the clients whose norm was at most C: (Σ (b_k − ½) + N(0, noise²)) / m + ½, where m is the
    expected number of clients.

    Attributes:
        quantile: the share of clients whose change shall stay whole, in (0, 1).
        rate: how fast the bound moves, positive.
        noise: the standard deviation of the noise on the sum of the b_k − ½. It takes part of the privacy: it must be
            more than half the noise multiplier.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        check_range("(0, 1)", **{"adaptive.quantile": self.quantile})
        check_range("(0, inf)", **{"adaptive.rate": self.rate})
        if self.noise is None or not (math.isfinite(self.noise) and self.noise > 0):
            raise ConfigError(
                "Adaptive clipping wants noise of its own: how many clients are within the bound is private "
                "too. adaptive.noise must be a positive number, e.g. a twentieth of the cohort; got {got!r}.",
                got=self.noise,
            )


@dataclass(frozen=True, kw_only=True)
class DifferentialPrivacy:
    """What protects each client as a whole, with all its examples and private values.

    Attributes:
        noise: z, the noise multiplier: a round's noise has z times the standard deviation of what one client can
            change in the sum of all. 0: none, and no protection.
        clip: the bound of a client's change in L2 norm, one for everything (flat), or bounds by name pattern; of
            several patterns that match, the first counts. With ``adaptive`` the first round's.
        adaptive: how the one bound follows the clients' norms; None: it stays.
        delta: δ, the probability that the bound by ε fails; below 1 / N for N clients.
        budget: the largest ε that rounds may come to; None: they are counted, not bounded.
        accountant: ``"pld"`` (privacy loss distributions, the tighter) or ``"rdp"`` (Rényi).
        heaviest: the weight that counts as 1, and above which weights count as 1 too; wanted where a method weights
            clients by their numbers of examples, and refused where all weigh the same.
        noise_seed: None: noise comes from the system, and nobody can draw it again. A number: from streams of that
            seed, so that a simulation can be repeated; that protects nobody.
        unit: what is protected; ``"client"`` alone.
    """

    noise: float
    clip: float | Mapping[str, float] | tuple[tuple[str, float], ...] | None = None
    adaptive: Adaptive | None = None
    delta: float = 1e-5
    budget: float | None = None
    accountant: Accountant = "pld"
    heaviest: float | None = None
    noise_seed: int | None = None
    unit: str = "client"

    def __post_init__(self) -> None:
        if self.unit != "client":
            raise ConfigError(
                "unit must be 'client'; got {got!r}. An ε for single examples would be wrong for a split "
                "model: noise on federated gradients alone leaves these dependent, through private values "
                "that have no noise, on all other examples of the client.",
                got=self.unit,
            )
        check_range("[0, inf)", noise=self.noise)
        if self.clip is None:
            raise ConfigError(
                "Noise without clipping protects nobody: a client's change may be larger than any noise. Set "
                "clip, the bound of a change's norm, beside noise = {noise:g}.",
                noise=self.noise,
            )
        if isinstance(self.clip, Mapping):
            object.__setattr__(self, "clip", tuple(self.clip.items()))
        _ = self.clipping
        check_choice("accountant must be", self.accountant, get_args(Accountant))
        check_range("(0, 1)", delta=self.delta)
        check_range("(0, inf)", budget=self.budget, heaviest=self.heaviest)
        if self.budget is not None and not self.noise:
            raise ConfigError(
                "A budget of ε = {budget:g} wants noise; without any, one round costs all.",
                budget=self.budget,
            )
        if self.adaptive is not None:
            self._check_adaptive(self.adaptive)

    def _check_adaptive(self, adaptive: Adaptive) -> None:
        assert adaptive.noise is not None
        if not isinstance(self.clip, int | float):
            raise ConfigError(
                "Adaptive clipping moves one bound: clip must be a number, not a table of patterns."
            )
        if not self.noise:
            raise ConfigError("Adaptive clipping wants noise on the changes too: noise must be positive.")
        if not 2 * adaptive.noise > self.noise:
            raise ConfigError(
                "adaptive.noise must be more than half of noise = {noise:g}, as both share its privacy; got "
                "{got:g}.",
                noise=self.noise,
                got=adaptive.noise,
            )

    @property
    def clipping(self) -> Clipping:
        """The bounds by pattern, ``"*"`` for one of everything."""
        return Clipping(self.clip if isinstance(self.clip, tuple) else (("*", self.clip),))  # type: ignore[arg-type]

    @property
    def multiplier(self) -> float:
        """The noise multiplier of the changes alone: with an adaptive bound (z⁻² − (2 σ_b)⁻²)^(−½), more than z.

        Then changes and counts together cost what a multiplier of z costs.
        """
        if self.adaptive is None or self.adaptive.noise is None:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.adaptive.noise) ** -2)

    def release(self, rate: float) -> Release:
        """Return what a round gives away, for accounting."""
        return Release(rate=rate, noise=self.noise)

    def check_clients(self, clients: int) -> None:
        """Raise ConfigError unless δ is below 1 / N: a mechanism that publishes one client in N has δ = 1 / N."""
        if self.delta * clients >= 1:
            raise ConfigError(
                "delta must be below 1 / N = {most:.3g} for N = {clients:,} clients; got {got:g}. A larger "
                "one would allow to publish a client.",
                most=1 / clients,
                clients=clients,
                got=self.delta,
            )

    def draw(self, round: int) -> Draw:
        """Return the numbers that a round's noise is made of."""
        return SystemDraw() if self.noise_seed is None else RunDraws(self.noise_seed, "noise", round).link(0)


@dataclass(frozen=True)
class Clipping:
    """Bounds of the L2 norm of a change, by name pattern: d · min(1, C / ‖d‖), for each pattern's tensors together.

    With G patterns in use the noise of the pattern g has the standard deviation z √G C_g: a client then changes the
    sum by at most 1 / z in units of the noise, as with one bound.

    Attributes:
        bounds: patterns and bounds C, in units of the parameters; a name is of the first pattern that matches.
    """

    bounds: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ConfigError("clip wants a number, or at least one pattern with a bound.")
        for pattern, bound in self.bounds:
            if isinstance(bound, bool) or not (
                isinstance(bound, int | float) and math.isfinite(bound) and bound > 0
            ):
                raise ConfigError(
                    "clip wants a positive number for {pattern!r}; got {got!r}.",
                    pattern=pattern,
                    got=bound,
                )

    def groups(self, names: Collection[str]) -> dict[str, list[str]]:
        """Return the names of each pattern.

        Raises:
            ConfigError: there are no names; a name is of no pattern, so nothing bounds it; or a pattern has no name.
        """
        if not names:
            raise ConfigError(
                "Nothing is federated, so nothing leaves the clients that could be clipped. Leave differential privacy "
                "and secure sums out, or take another method."
            )
        found: dict[str, list[str]] = {pattern: [] for pattern, _ in self.bounds}
        for name in sorted(names):
            pattern = next((p for p in found if fnmatchcase(name, p)), None)
            if pattern is None:
                raise ConfigError(
                    "No pattern of clip matches {name!r}, which leaves the clients, so nothing would bound it. "
                    "Add a bound for '*'.",
                    name=name,
                )
            found[pattern].append(name)
        for pattern, own in found.items():
            if not own:
                raise ConfigError(
                    "The pattern {pattern!r} of clip matches nothing that leaves the clients.{near}",
                    pattern=pattern,
                    near=did_you_mean(pattern, list(names)),
                )
        return found

    def clipped(self, tensors: Params, scale: float = 1.0) -> tuple[Params, bool]:
        """Return the tensors within all bounds, and whether they were; whole numbers stay.

        What is scaled in half precision becomes double: rounded to so few digits it may exceed the bound.

        Args:
            tensors: a change, decoded.
            scale: of all bounds, e.g. of an adaptive one.
        """
        factors = self.factors(tensors, scale)
        return {n: scaled(v, factors[n]) if n in factors else v for n, v in tensors.items()}, not factors

    def factors(self, tensors: Params, scale: float = 1.0) -> dict[str, float]:
        """Return by name what ``clipped`` takes the tensors times that are beyond their bound; none, where all are within."""
        found = dict[str, float]()
        for (_, bound), names in zip(self.bounds, self.groups(floating(tensors)).values(), strict=True):
            size = norm({n: tensors[n] for n in names})
            if size > bound * scale:
                found |= dict.fromkeys(names, bound * scale / size)
        return found

    def deviations(self, names: Collection[str], multiplier: float, scale: float = 1.0) -> dict[str, float]:
        """Return the standard deviation of the noise on the sum of each tensor, by name."""
        root = math.sqrt(len(self.bounds))
        groups = self.groups(names)
        return {
            n: multiplier * root * scale * bound for pattern, bound in self.bounds for n in groups[pattern]
        }


def scaled(value: Tensor, factor: float) -> Tensor:
    """Return a tensor times a factor: one of half precision in double, as rounded it may exceed its bound."""
    return (value.to(exact(value)) if value.itemsize < 4 else value) * factor


def floating(tensors: Params) -> list[str]:
    """Return the names of the floating-point tensors."""
    return [n for n, v in tensors.items() if v.is_floating_point()]
