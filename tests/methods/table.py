"""Every method once, each with a small model that it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from safetensors.torch import save
from torch import nn

from fedkeep import Method, Run, averaging, methods, sgd, simulate
from fedkeep.core.params import Params
from fedkeep.engines import ClientResult, Sequential
from fedkeep.methods import Phase
from fedkeep.models import ConfidenceGate, MixtureOfExperts
from tests.methods.parts import Deep, Parts
from tests.tiny import Logits, classes

DATA = classes()
WHOLE = 100  # a mini-batch that holds everything


ROWS: dict[str, tuple[Callable[[], nn.Module], Method]] = {
    "fedavg": (Deep, methods.fedavg(local=Phase(batch_size=4))),
    "furl": (Logits, methods.furl("user", local=Phase(batch_size=4))),
    "local": (Deep, methods.local(local=Phase(batch_size=4))),
    "fedprox": (Deep, methods.fedprox(0.7, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fine_tuned": (Deep, methods.fine_tuned(local=Phase(batch_size=4))),
    "fedper": (Deep, methods.fedper("head.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "lg_fedavg": (Deep, methods.lg_fedavg("body.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedbn": (
        lambda: Deep(norm=True),
        methods.fedbn("norm.*", local=Phase(batch_size=WHOLE, optimizer=sgd(0.3))),
    ),
    "fedrep": (
        lambda: Deep(norm=True),
        methods.fedrep(
            "head.*",
            head_epochs=2,
            head_optimizer=sgd(0.5),
            local=Phase(batch_size=WHOLE, optimizer=sgd(0.3)),
        ),
    ),
    "fedrecon": (
        Deep,
        methods.fedrecon(
            "head.*",
            reconstruction_steps=3,
            reconstruction_optimizer=sgd(0.5),
            local=Phase(batch_size=2, optimizer=sgd(0.3)),
        ),
    ),
    "ditto": (Deep, methods.ditto(0.4, own_epochs=2, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "mr_mtl": (Deep, methods.mr_mtl(0.4, local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.3)))),
    "feddbe": (Parts, methods.feddbe(2.0, momentum=0.4, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedamp": (
        Deep,
        methods.fedamp(0.2, 2.0, lam=0.1, local=Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))),
    ),
    "knn_per": (Parts, methods.knn_per(2, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "gpfl": (Parts, methods.gpfl(0.5, local=Phase(batch_size=4, optimizer=sgd(0.2)))),
    "fedcp": (Parts, methods.fedcp(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedpac": (Parts, methods.fedpac(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "apfl": (Deep, methods.apfl(0.3, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "pfedme": (
        Deep,
        methods.pfedme(2.0, steps=3, own_optimizer=sgd(0.3), local=Phase(batch_size=4, optimizer=sgd(0.2))),
    ),
    "per_fedavg": (Deep, methods.per_fedavg(0.2, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "scaffold": (
        lambda: Deep(norm=True),
        methods.scaffold(local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3, rates={"head.*": 0.1}))),
    ),
    "feddyn": (
        lambda: Deep(norm=True),
        methods.feddyn(0.5, local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.2, momentum=0.5))),
    ),
    "ifca": (
        lambda: Deep(norm=True),
        methods.ifca(3, spread=0.5, local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3))),
    ),
    "pfedhn": (
        lambda: Deep(norm=True),
        methods.pfedhn(
            (5,),
            embedding=2,
            local=Phase(batch_size=7, epochs=2, optimizer=sgd(0.3)),
            server=averaging(sgd(0.5, momentum=0.5), by="uniform"),
        ),
    ),
    "fedbabu": (Deep, methods.fedbabu("head.*", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedmmd": (Parts, methods.fedmmd(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedfusion": (Parts, methods.fedfusion("multi", local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "asp_mtl": (Parts, methods.asp_mtl(6, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "pfl_da": (Parts, methods.pfl_da(local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "kteps": (Parts, methods.kteps(0.5, 0.5, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "kteps_star": (
        Parts,
        methods.kteps_star(1, 2, table="encoder.weight", local=Phase(batch_size=4, optimizer=sgd(0.3))),
    ),
    "fedala": (
        Deep,
        methods.fedala(
            "head.*", rate=2.0, tolerance=1e-4, most_passes=3, local=Phase(batch_size=4, optimizer=sgd(0.3))
        ),
    ),
    "fedproto": (Parts, methods.fedproto(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "fedrod": (Parts, methods.fedrod(local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "moon": (Parts, methods.moon(2.0, local=Phase(batch_size=4, optimizer=sgd(0.3)))),
    "mixture": (
        lambda: MixtureOfExperts(Deep(), Deep(norm=True), ConfidenceGate()),
        methods.mixture(
            local=Phase(batch_size=4, optimizer=sgd(0.3), epochs=3), local_epochs=10, mixture_epochs=10
        ),
    ),
}


def trained(name: str, rounds: int = 3, **options: Any) -> Run:
    make, method = ROWS[name]
    return simulate(make().double(), method, DATA, rounds=rounds, cohort=4, seed=3, **options)


class Watched(Sequential):
    """Keeps the bytes of every upload and the private values that stayed."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []
        self.weights: list[float] = []
        self.private: list[Params] = []

    def train(self, *arguments: Any) -> Iterator[ClientResult]:
        for result in super().train(*arguments):
            assert result.kept is not None
            self.bytes.append(save({n: v.contiguous() for n, v in result.upload.deltas.items()}))
            self.weights.append(result.upload.weight)
            self.private.append(result.kept)
            yield result
