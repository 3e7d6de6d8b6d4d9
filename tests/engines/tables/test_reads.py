"""What a term reads of tables, found out where the term does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Client, Method, Phase, methods, sgd, simulate
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import CrossEntropy, Scaled, Term, cross_entropy, l2_penalty
from fedkeep.privacy import GaussianNoise
from tests.engines.test_conformance import Words
from tests.tiny import same_bits, texts

DATA = texts(counts=(4, 9, 3, 5, 12, 1), vocabulary=300)
LOCAL = Phase(batch_size=2, optimizer=sgd(0.2))


@dataclass(frozen=True)
class Pulled(Term):
    """FedProx's term as somebody would write it who has never heard of tables."""

    mu: float = 0.5

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        names = [n for n in received if n in net.trainable()]
        return 0.5 * self.mu * torch.stack([((params[n] - received[n]) ** 2).sum() for n in names]).sum()


@dataclass(frozen=True)
class Silent(Term):
    """A cross-entropy that does not say what it reads."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy()(net, params, batch, received)


def method(loss: Term, **client: object) -> Method:
    return Method(client=Client(phases=(LOCAL.but(loss=loss),), **client))  # type: ignore[arg-type]


def trained(what: Method) -> tuple[Params, list[float]]:
    torch.manual_seed(0)
    run = simulate(Words().double(), what, DATA, rounds=3, cohort=4, engine="sequential", evaluate_every=0)
    return run.server, [r.value for r in run.history if r.metric == "upload_bytes"]


def loss_of(what: Method) -> Term:
    return with_declared_tables(what, Net(Words().double()), DATA).client.phases[0].loss


def test_a_term_that_says_nothing_is_as_good_as_one_that_does() -> None:
    packaged, own = trained(methods.fedavg(local=LOCAL)), trained(method(Silent()))
    assert same_bits(own[0], packaged[0])
    assert own[1] == packaged[1]  # the client's own rows, not 12 KB of table


def test_what_is_found() -> None:
    silent = loss_of(method(Silent()))
    assert (silent.reads_parameters, silent.reads_received, silent.pull) == (False, False, 0.0)
    assert loss_of(method(cross_entropy())) == cross_entropy()  # it says so itself


def test_a_term_that_reads_tables_has_them_whole_and_says_so() -> None:
    with pytest.warns(UserWarning, match="'embedding.weight' is trained and sent whole"):
        assert loss_of(method(Silent() + 0.1 * Pulled())).reads_parameters
    with pytest.warns(UserWarning, match="'embedding.weight' is trained and sent whole"):
        own, whole = trained(method(Silent() + Pulled())), trained(methods.fedprox(0.5, local=LOCAL))
    torch.testing.assert_close(own[0], whole[0], rtol=0, atol=1e-15)
    assert max(whole[1]) < min(own[1]) / 5


@dataclass(frozen=True)
class Decayed(CrossEntropy):
    """Cross-entropy, and ½ λ ‖table‖²."""

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        penalty = 0.05 * params["embedding.weight"].square().sum()
        return super().__call__(net, params, batch, received) + penalty


@dataclass(frozen=True)
class Doubled(Proximal):
    """Of twice the pull that the class above states, to rows that an example looks up or not."""

    reads_parameters = False

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return 2 * super().__call__(net, params, batch, received)


def test_what_a_class_states_is_not_of_an_heir_that_replaces_the_call() -> None:
    assert Decayed().reads_parameters is None
    assert (Doubled(0.5).reads_parameters, Doubled(0.5).reads_received, Doubled(0.5).pull) == (
        False,
        True,
        None,
    )
    assert Proximal(0.5).pull == 0.5
    assert (
        Scaled(2.0, cross_entropy()).reads_parameters is False
    )  # what is around a term says so for its heirs

    class Named(CrossEntropy):
        """The same call."""

    class Again(Named):
        reads_parameters = False

        def __call__(self, *given: Any) -> Tensor:
            return super().__call__(*given)

    assert Named().reads_parameters is Again().reads_parameters is False


def test_a_loss_that_adds_a_penalty_to_a_packaged_one_trains_as_the_sum_of_both() -> None:
    with pytest.warns(UserWarning, match="trained and sent whole, though the first client's examples use"):
        own = trained(method(Decayed()))
    with pytest.warns(UserWarning, match="trained and sent whole"):
        terms = trained(method(cross_entropy() + 0.1 * l2_penalty("embedding.weight")))
    torch.testing.assert_close(own[0], terms[0], rtol=0, atol=1e-12)


def test_an_heir_of_the_proximal_term_pulls_as_it_says() -> None:
    heir, packaged = (
        trained(method(cross_entropy() + Doubled(0.5))),
        trained(methods.fedprox(1.0, local=LOCAL)),
    )
    torch.testing.assert_close(heir[0], packaged[0], rtol=0, atol=1e-12)


def test_exact_tables_are_whole_where_the_upload_chain_changes_every_row() -> None:
    """Noise falls on rows that a client never looks up, too."""
    noisy = methods.fedavg(local=LOCAL).but(upload=(GaussianNoise(0.01),))
    exact, whole = trained(noisy), trained(noisy.on_client(tables="whole"))
    assert same_bits(exact[0], whole[0])
    assert exact[1] == whole[1]
    assert trained(noisy.on_client(tables="local"))[1] != whole[1]
