"""Any method whose reduction is a sum, with differential privacy of its clients.

One round: (1) every client is in with the probability q, by a coin of its own; (2) each change is clipped as it comes;
(3) what is released is (Σ_k w_k d̄_k + noise) / (q N), w_k in [0, 1]; (4) the server steps with it as the method does.
The denominator is the expected number of clients: how many there were is private too. A round that nobody is in
releases noise alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import SERVER, Params, State, under
from fedkeep.methods.aggregate import Reduced, RunningMean
from fedkeep.methods.base import Method
from fedkeep.methods.client import Sent, by_share, newest
from fedkeep.methods.hook_declarations import sent_to, why_unfit
from fedkeep.methods.server import Global, Roster, WeighedBy, WeightedMean
from fedkeep.privacy import Adaptive, DifferentialPrivacy, GaussianNoise, Link
from fedkeep.privacy.dp import floating
from fedkeep.split import Upload
from fedkeep.split.halves import power_vectors

BOUND, INSIDE = "clip_bound", "share_inside"
"""The server's state that holds an adaptive bound, and what a reduction says of the clients within it."""


@dataclass(frozen=True, kw_only=True)
class PrivateMean(WeighedBy):
    """The sum of clipped changes with noise, over the expected number of clients.

    Tables come whole: which rows the clients have is private. Whole numbers (counters) stay as they are.

    Attributes:
        mean: the method's own, which gives the weights.
        privacy: clipping and noise.
        cohort: q N, the expected number of clients.
    """

    privacy: DifferentialPrivacy
    cohort: float

    counts_empty: ClassVar[bool] = True

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> NoisyMean:
        """Return the empty sum; ConfigError: the patterns of ``clip`` don't fit what leaves the clients."""
        return NoisyMean(self, server, start, cohort)


class NoisyMean(RunningMean):
    """The sum of a round's clipped uploads, and its noise.

    Args:
        rule: says how.
        server: what the server has.
        start, cohort: as for ``RunningMean``.
    """

    def __init__(self, rule: PrivateMean, server: Global, start: Params, cohort: Sequence[str]) -> None:
        super().__init__(start, cohort)
        privacy, self.rule, self.round = rule.privacy, rule, server.round
        self.scale = 1.0
        if privacy.adaptive is not None:
            self.scale = float(server.state[BOUND]) / privacy.clipping.bounds[0][1]
        self.deviations = privacy.clipping.deviations(floating(start), privacy.multiplier, self.scale)
        self.inside = self.outside = 0

    def seen(self, client: str, upload: Upload) -> Upload:
        """Return the upload, of a weight of at most 1."""
        return replace(upload, weight=min(upload.weight / (self.rule.privacy.heaviest or 1.0), 1.0))

    def _factors(self, upload: Upload) -> Mapping[str, float]:
        """Return what clips the changes."""
        found = self.rule.privacy.clipping.factors(upload.deltas, self.scale)
        self.inside, self.outside = self.inside + (not found), self.outside + bool(found)
        return found

    def merge(self, other: RunningMean) -> None:
        """Take over what another sum of the same round holds."""
        super().merge(other)
        assert isinstance(other, NoisyMean)
        self.inside, self.outside = self.inside + other.inside, self.outside + other.outside

    def value(self) -> Reduced:
        """Return what is released."""
        rule, sums, cohort = self.rule, self.sums(), self.rule.cohort
        draw = rule.privacy.draw(self.round)

        def released(total: Tensor, sigma: float) -> Tensor:
            noise = draw.normal(total.shape, total.dtype).mul_(sigma).to(total.device)
            return noise.add_(total).div_(cohort)

        found = dict(
            self.start
        )  # in the order of the server's names; noise is drawn in the order of all names
        for name in sorted(self.deviations):
            found[name] = sums.made(name, partial(released, sigma=self.deviations[name]))
        state = under(SERVER, found)
        if rule.privacy.adaptive is not None:
            centred = (self.inside - self.outside) / 2 + (rule.privacy.adaptive.noise or 0.0) * draw.normal(
                ()
            )
            state[INSIDE] = centred / cohort + 0.5
        return Reduced(
            changes={n: v for n, v in found.items() if not n.startswith(SERVER)},
            state=state,
            weight=cohort,
            count=round(cohort),
        )


@dataclass(frozen=True, kw_only=True)
class WithBound:
    """The method's first state on the server, and the first bound."""

    state: Callable[[Net, Roster], State]
    bound: float

    def __call__(self, net: Net, clients: Roster) -> State:
        """Return the state."""
        return {**self.state(net, clients), BOUND: torch.tensor(self.bound, dtype=torch.float64)}


@dataclass(frozen=True, kw_only=True)
class SendWithoutBound:
    """What the method sends each client; it does not know of the bound."""

    send: Callable[[Global, str], Sent]

    @property
    def sends_to(self) -> str:
        """Whose the method's is."""
        return sent_to(self.send)

    def __call__(self, server: Global, client: str) -> Sent:
        """Return it."""
        return self.send(without_bound(server), client)


@dataclass(frozen=True, kw_only=True)
class MoveBound:
    """The method's update, which does not know of the bound, and then the bound's."""

    update: Callable[[Global, Reduced], Global]
    adaptive: Adaptive

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next values."""
        state = {n: v for n, v in reduced.state.items() if n != INSIDE}
        after = self.update(without_bound(server), replace(reduced, state=state))
        share = float(reduced.state[INSIDE])
        moved = server.state[BOUND] * math.exp(-self.adaptive.rate * (share - self.adaptive.quantile))
        return after.but(state={**after.state, BOUND: moved})


def without_bound(server: Global) -> Global:
    """Return the server without an adaptive bound among its state."""
    return server.but(state={n: v for n, v in server.state.items() if n != BOUND})


def bounded_mean(
    method: Method,
    heaviest: float | None,
    *,
    wants: str,
    heaviest_name: str,
    other: str,
    rows: str,
    shares: str,
) -> WeightedMean:
    """Return a method's reduction if it is a sum over clients in which each weighs at most 1.

    Args:
        method: the method.
        heaviest: the weight that counts as 1; None: nobody said.
        wants, heaviest_name: who asks, and how the setting is called there.
        other, rows, shares: why it is no other reduction, no mean over a row's owners, no share of the cohort.

    Raises:
        MethodError: it is not.
    """
    mean, name = method.server.reduce, repr(method.name)
    if not (isinstance(mean, WeightedMean) and mean.is_sum):
        kept = f" Its server keeps {mean.keeps}." if mean.keeps else ""
        kind = type(mean).__name__
        raise MethodError(
            "{name} reduces uploads by {kind}, {other}. {wants} a WeightedMean.{kept}",
            name=name,
            kind=kind,
            other=other,
            wants=wants,
            kept=kept,
        )
    if why := why_unfit(method.server.update, "clipping"):
        raise MethodError(
            "{name} cannot have its uploads clipped: {why}. {wants} clipping. Take another method.",
            name=name,
            why=why,
            wants=wants,
        )
    if mean.missing_rows == "owners_only":
        raise MethodError(
            "{name} divides each row by the weights of those who hold it, {rows}. {wants} missing_rows='unchanged'.",
            name=name,
            rows=rows,
            wants=wants,
        )
    if mean.by == "examples" and heaviest is None:
        raise MethodError(
            "{name} weights clients by their numbers of examples, which have no bound. Set weighting='uniform', or "
            "{heaviest_name}, the number of examples that counts as weight 1.",
            name=name,
            heaviest_name=heaviest_name,
        )
    if method.client.accept not in (newest, by_share):
        raise MethodError(
            "{name} keeps by a rule of its own (Client.accept), which is given the client's share of the cohort's "
            "examples, {shares}. Leave it out.",
            name=name,
            shares=shares,
        )
    if method.client.accept is by_share:
        raise MethodError(
            "{name} scales what a client keeps by its share of the cohort's examples, {shares}. Take private_scale=1.",
            name=name,
            shares=shares,
        )
    return mean


def differentially_private(method: Method, privacy: DifferentialPrivacy, cohort: float) -> Method:
    """Return a method with differential privacy of its clients over its federated part.

    Args:
        method: its reduction is a ``WeightedMean``.
        privacy: what is asked for.
        cohort: q N, the expected number of clients in a round.

    Raises:
        MethodError: a change of one client would reach others by another way than the sum of clipped changes.
    """
    mean = bounded_mean(
        method,
        privacy.heaviest,
        wants="Differential privacy wants",
        heaviest_name="privacy.heaviest",
        other="which is no plain sum over clients, so what one client changes is not bounded by clipping",
        rows="and who does is private",
        shares="so each client's number reaches the others' private values, and from there their uploads",
    )
    if why := why_unfit(method.server.update, "noise"):
        raise MethodError(
            "{method!r} bears no noise: {why}. Take another method.", method=method.name, why=why
        )
    if privacy.heaviest is not None and mean.by == "uniform":
        raise MethodError(
            "{method!r} counts every client as 1, so there is no number of examples that counts as weight 1. "
            "Leave out privacy.heaviest.",
            method=method.name,
        )
    talks = next((link for link in method.upload if type(link).update is not Link.update), None)
    if talks is not None:
        raise MethodError(
            "The link {got} of {method!r} gathers reports of clients on the server, which no "
            "noise covers. Leave it out; privacy.adaptive moves a bound with noise.",
            got=type(talks).__name__,
            method=method.name,
        )
    server = method.server.but(reduce=PrivateMean(mean=mean, privacy=privacy, cohort=float(cohort)))
    if privacy.adaptive is not None:
        server = server.but(
            state=WithBound(state=server.state, bound=privacy.clipping.bounds[0][1]),
            send=None if server.send is None else SendWithoutBound(send=server.send),
            update=MoveBound(update=server.update, adaptive=privacy.adaptive),
        )
    return method.but(server=server)


def check_variances(method: Method, module: nn.Module) -> None:
    """Refuse noise on running variances of normalisation layers and on vectors of spectral norms.

    It would make a variance negative, and give a norm, which is the vectors' product with the weight, any sign.

    Args:
        method: as it runs, with its differential privacy.
        module: the model as the method trains it.

    Raises:
        MethodError: such a buffer is federated, and uploads or their sum get noise.
    """
    reduce = method.server.reduce
    links = [link.sigma for link in method.upload if isinstance(link, GaussianNoise) and link.sigma]
    noise = f"GaussianNoise({links[0]:g})" if links else ""
    if isinstance(reduce, PrivateMean) and reduce.privacy.noise:
        noise = f"differential privacy with noise={reduce.privacy.noise:g}"
    if not noise:
        return
    federated = method.split.halves(module).federated_names
    layers = dict(module.named_modules())
    for name in federated:
        layer, _, leaf = name.rpartition(".")
        if layer in layers and leaf in power_vectors(layers[layer]):
            raise MethodError(
                "{name!r}, a vector of a spectral norm, is federated, and {noise} would give the norm any sign. Name the "
                "vectors private (private=[{own!r}]), or leave the noise out{how}.",
                name=name,
                noise=noise,
                own=f"{name[:-1]}?",
                how=" (noise = 0)" if links else "",
            )
        if leaf == "running_var" and isinstance(layers.get(layer), _NormBase):
            raise MethodError(
                "The running variance {name!r} is federated, and {noise} would make it negative and the model's outputs "
                "NaN. Leave the noise out{how}, put a GroupNorm in place of the layer, or take a method that keeps the "
                "statistics private: fedbn, or one with an option private = '{layer}running_*'.",
                name=name,
                noise=noise,
                layer=f"{layer}." if layer else "",
                how=" (noise = 0)" if links else "",
            )
