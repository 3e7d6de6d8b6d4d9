"""Uploads are bounded in norm, where the bound follows a quantile of the clients' norms, or get noise.

Source of the bound: Andrew, Thakkar, McMahan and Ramaswamy, Differentially Private Learning with Adaptive Clipping,
NeurIPS 2021 (arXiv 1905.03871), §2.2 and algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedkeep.core.errors import ConfigError, UploadError, check_range
from fedkeep.core.params import Params
from fedkeep.kernels import values
from fedkeep.privacy.draws import Draw
from fedkeep.privacy.link import Encoded, Link


@dataclass(frozen=True)
class QuantileClip(Link):
    """Scales a change d down to the bound C, d · min(1, C / ‖d‖), and moves C towards the γ-quantile of the norms ‖d‖.

    The norm is over all floating-point tensors together. A client reports b = 1 if ‖d‖ ≤ C, else 0, and after the round
    C ← C · exp(−η (b̄ − γ)), with b̄ the mean of the reports. Clients count alike, whatever their weight.

    Attributes:
        quantile: γ, the share of clients whose change stays whole, in (0, 1).
        rate: η, positive.
        bound: C of the first round, in units of the parameters.
        bit_noise: the standard deviation of Gaussian noise that a client adds to its own report; 0: none.
    """

    quantile: float = 0.5
    rate: float = 0.2
    bound: float = 0.1
    bit_noise: float = 0.0

    rowwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("(0, 1)", quantile=self.quantile)
        check_range("(0, inf)", rate=self.rate, bound=self.bound)
        check_range("[0, inf)", bit_noise=self.bit_noise)

    def server_state(self, shapes: Params) -> Params:
        """Return the first bound."""
        return {"bound": torch.tensor(self.bound, dtype=torch.float64)}

    def sent(self, state: Params) -> Params:
        """Return the bound of this round."""
        return {"bound": state["bound"]}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return the clipped change, and whether it was within the bound as a report."""
        if "bound" not in sent:
            raise ConfigError(
                "QuantileClip wants the server's bound, and was sent none. Pass encode what Chain.sent gives."
            )
        bound, size = float(sent["bound"]), norm(tensors)
        scale = min(1.0, bound / size) if size else 1.0
        inside = torch.tensor(float(size <= bound), dtype=torch.float64)
        if self.bit_noise:
            inside = inside + self.bit_noise * draw.normal(())
        clipped = {n: v * scale if v.is_floating_point() and scale < 1 else v for n, v in tensors.items()}
        return Encoded(tensors=clipped, report={"inside": inside})

    def check_report(self, report: Params) -> None:
        """Refuse a report that is no bit, or with noise lies 10 standard deviations off both."""
        value = report.get("inside")
        if set(report) != {"inside"} or value is None or value.shape != () or value.dtype != torch.float64:
            raise UploadError(
                "QuantileClip's report should be 'inside', a float64 number; it is {report}",
                report=sorted(report),
            )
        slack = 10 * self.bit_noise
        if not (-slack <= float(value) <= 1 + slack and (slack or float(value) in (0.0, 1.0))):
            raise UploadError(
                "QuantileClip's report should be 0 or 1; it is {value}",
                value=float(value),
            )

    def update(self, state: Params, reports: Params, count: int) -> Params:
        """Return the bound of the next round."""
        share = float(reports["inside"]) / count
        return {"bound": state["bound"] * math.exp(-self.rate * (share - self.quantile))}


def norm(tensors: Params) -> float:
    """Return the L2 norm of all floating-point tensors together, summed in double precision by name."""
    floating = [tensors[n] for n in sorted(tensors) if tensors[n].is_floating_point()]
    return math.hypot(*map(values.norm, floating))


@dataclass(frozen=True)
class GaussianNoise(Link):
    """Adds independent Gaussian noise to every floating-point number of an upload (KTEPS, arXiv 2107.11956, §4.2).

    Whole numbers (counters, places) stay. Frozen parameters are in no upload, so they stay too. Uploads are not
    clipped, so no (ε, δ) follows from it: this is not differential privacy. Where the noise comes from is the caller's
    choice (``draws``): from the run's seed it hides nothing from whoever knows that.

    Attributes:
        sigma: the standard deviation, in units of the parameters; 0 changes nothing.
    """

    sigma: float = 1e-3

    def __post_init__(self) -> None:
        check_range("[0, inf)", sigma=self.sigma)

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return the tensors with noise."""
        if not self.sigma:
            return Encoded(tensors=tensors)
        floating = sorted(n for n, v in tensors.items() if v.is_floating_point())
        noisy = {}  # in the order of names, so that the order in which a server holds its parameters has no part in it
        for name in floating:
            value = tensors[name]
            noisy[name] = value + self.sigma * draw.normal(value.shape, value.dtype).to(value.device)
        return Encoded(tensors={**tensors, **noisy})
