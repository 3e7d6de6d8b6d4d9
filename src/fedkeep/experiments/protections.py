"""Tables of a configuration that protect clients, or the server from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from fedkeep.core.errors import ConfigError, check_choice
from fedkeep.experiments.options import check_options
from fedkeep.experiments.strict import Open, Strict
from fedkeep.methods import (
    ClippedMean,
    Krum,
    Median,
    Method,
    Reduction,
    SecureSums,
    TrimmedMean,
    WeightedMean,
    securely,
)
from fedkeep.privacy import Adaptive, DifferentialPrivacy

REDUCTIONS: dict[str, Callable[..., Reduction]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "clipped_mean": ClippedMean,
}


class AuditConfig(Strict):
    """What may tell of what stays on a device; ``fedkeep.audit`` says what each entry means."""

    allow: Annotated[tuple[str, ...], Field(strict=False)]


class AdaptiveConfig(Strict):
    """A clipping bound that follows the clients' norms; ``fedkeep.privacy.Adaptive``."""

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None


class PrivacyConfig(Strict):
    """Differential privacy of clients; ``fedkeep.privacy.DifferentialPrivacy`` says what each key means."""

    noise: float
    clip: float | dict[str, float] | None = None
    adaptive: AdaptiveConfig | None = None
    delta: float = 1e-5
    budget: float | None = None
    accountant: Literal["pld", "rdp"] = "pld"
    heaviest: float | None = None
    noise_seed: int | None = None
    unit: str = "client"

    def build(self) -> DifferentialPrivacy:
        """Return what the table asks for; ConfigError: it makes no sense."""
        fields = self.model_dump(exclude={"adaptive"})
        adaptive = None if self.adaptive is None else Adaptive(**self.adaptive.model_dump())
        return DifferentialPrivacy(**fields, adaptive=adaptive)


class SecureConfig(Strict):
    """Secure sums; ``fedkeep.methods.SecureSums`` says what each key means."""

    clip: float
    threshold: float = 2 / 3
    heaviest: float | None = None
    bits: Literal[32, 64] = 32


class ReduceConfig(Open):
    """A reduction for uploads that can't be trusted: ``kind``, further keys are its options.

    ``kind`` is median, trimmed_mean (``share``), krum (``faulty``, ``taken``) or clipped_mean (``bound``).
    """

    kind: str

    def build(self) -> Reduction:
        """Return the reduction; ConfigError, MethodError: it is not known, or an option makes no sense."""
        check_choice("method.reduce.kind must be", self.kind, REDUCTIONS)
        make = REDUCTIONS[self.kind]
        return make(**check_options("method.reduce", make, self.options, ("by", "missing_rows")))


def protected(method: Method, reduce: ReduceConfig | None, secure: SecureConfig | None) -> Method:
    """Return a method with another reduction, or by secure sums, where a table asks for it.

    Raises:
        ConfigError: the method's own reduction is no mean that another could take the place of.
        MethodError: secure sums cannot do what the method does.
    """
    if reduce is not None:
        if type(method.server.reduce) is not WeightedMean:
            raise ConfigError(
                f"method.reduce: {method.name!r} reduces uploads in a way of its own, by "
                f"{type(method.server.reduce).__name__}. Leave the table out."
            )
        method = method.on_server(reduce=reduce.build())
    return method if secure is None else securely(method, SecureSums(**secure.model_dump()))
