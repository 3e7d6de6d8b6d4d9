"""What FedAvg's and FURL's relatives refuse, and their parts of a configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedkeep import methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.engines import auto
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.methods import batch_norm_names
from fedkeep.methods.added_parts import with_copy
from tests.methods.table import trained
from tests.refusals import raises
from tests.tiny import Logits, Noisy, classes, run_by


def test_the_names_of_batch_normalisation() -> None:
    assert batch_norm_names(Noisy()) == (
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    )
    assert batch_norm_names(nn.BatchNorm1d(2, affine=False, track_running_stats=True))[0] == "running_mean"
    assert methods.fedbn(batch_norm_names(Noisy())).split.table(Noisy())[-1]["half"] == "federated"
    with raises(MethodError, said="Sequential has no batch normalisation;", module="Sequential"):
        batch_norm_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def test_a_model_over_several_devices_is_refused_by_name() -> None:
    advice = (
        " is a DataParallel, which spreads every batch over several devices. Give the module that it holds (.module); "
        "simulate's device says where to train."
    )
    for model, who in (
        (nn.DataParallel(Logits()), "The model"),
        (nn.Sequential(nn.DataParallel(Logits())), "The layer '0'"),
    ):
        with raises(MethodError, text=who + advice):
            methods.fedavg().made_for(model)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LazyLinear(3)


def alias() -> nn.Module:
    model = Logits()
    model.other = nn.Parameter(model.user.data[1:])
    return model


def in_place() -> nn.Module:
    model = Logits()
    model.linear.compile()  # nothing is compiled before the first call
    return model


def sparse() -> nn.Module:
    model = Logits()
    model.register_buffer("matrix", torch.eye(2).to_sparse(), persistent=False)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (
            Lazy,
            (
                "The layer 'body' is a LazyLinear, and its 'body.weight' has no shape before its first call. Call the "
                "model on a batch once, or give the layer its sizes."
            ),
        ),
        (
            lambda: Logits().to("meta"),
            (
                "'user' is on the device 'meta', which holds no values. Load the model's "
                "weights first, e.g. by to_empty(device='cpu') and load_state_dict."
            ),
        ),
        (
            sparse,
            (
                "'matrix' is a sparse tensor (torch.sparse_coo), which is neither sent nor kept. Keep its places and "
                "its values as buffers, and make it of them in forward, e.g. by torch.sparse_coo_tensor."
            ),
        ),
        (
            lambda: torch.jit.script(nn.Linear(2, 2)),
            ("The model is a script of torch.jit. Give the module that it was made from."),
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), torch.jit.script(nn.Linear(2, 2))),
            ("The layer '1' is a script of torch.jit. Give the module that it was made from."),
        ),
        (
            lambda: torch.compile(Logits()),
            (
                "The model is what torch.compile returns, which hides what columns its "
                "forward takes. Give the module that it holds (._orig_mod); layers in it may be compiled."
            ),
        ),
        (
            alias,
            (
                "'user' and 'other' are two tensors in one memory, and fedkeep trains a copy of the model, in which each "
                "has its own. Give both names one Parameter (self.b = self.a) to tie them, or clone() one."
            ),
        ),
        (
            in_place,
            (
                "The layer 'linear' was compiled in place, which is lost where fedkeep copies the model. Give it "
                "uncompiled, or put torch.compile(layer) into the model where it is made."
            ),
        ),
    ],
)
def test_what_is_no_plain_module_is_refused_by_name(make: Callable[[], nn.Module], wanted: str) -> None:
    with raises(MethodError, text=wanted):
        methods.fedavg().made_for(make())


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.body.lock = threading.Lock()


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(MethodError) as error:
        methods.fedavg().made_for(Locked())
    assert "'lock' of the layer 'body' is a lock" in error.value.facts["what"]


def test_weights_under_the_newer_form_of_weight_norm_are_trained() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    names = {name for name, _ in methods.fedavg().made_for(model).named_parameters()}
    assert names == {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}


class Held(nn.Module):
    """Holds a layer as ``torch.compile`` does, and compiles nothing."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._orig_mod = layer

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Held(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_workers_are_never_started_for_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, said="Workers cannot train a model with compiled", layer="the layer 'body'"):
        simulate(Compiled(), methods.fedavg(), classes(), rounds=1, cohort=3, engine="workers", workers=2)
    monkeypatch.setattr(auto, "WORTH", -1e9)  # workers pay for anything
    monkeypatch.setattr(auto, "LONG", 0)
    for model, reason in (
        (Compiled(), "the layer 'body' is compiled, which workers cannot do"),
        (Logits(), "3 clients side by side save about"),
    ):
        run = simulate(model, methods.fedavg(), classes(), rounds=2, cohort=3, workers=3)
        assert run.engine_reason.startswith(reason)


class Detached(Logits):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "centralised"])
def test_a_loss_that_depends_on_nothing_trained_is_an_error(engine: str) -> None:
    with pytest.raises(
        MethodError,
        match=r"The loss depends on none of.*linear\.weight.*linear\.bias",
    ):
        simulate(Detached(), methods.fedavg(), classes(), rounds=1, **run_by(engine))


def test_copies_do_not_collide_and_leave_the_model_alone() -> None:
    model = Logits()
    names = list(model.state_dict())
    both = with_copy(model)
    assert list(both.state_dict()) == names + [f"own.{n}" for n in names]
    assert list(model.state_dict()) == names
    with pytest.raises(MethodError, match="^Logits has an attribute.*'own'"):
        with_copy(both)


def test_weight_decay_does_not_learn_a_share() -> None:
    phase = methods.Phase(optimizer=sgd(0.1, weight_decay=0.5))
    with raises(MethodError, said="Weight decay would pull APFL's share alpha to"):
        methods.apfl(local=phase)
    assert methods.apfl(adaptive=False, local=phase).client.phases[0].optimizer.weight_decay == 0.5


def test_centralised_training_refuses_what_it_cannot_do() -> None:
    with pytest.raises(MethodError, match="^'fedrecon' is stateless: its"):
        trained("fedrecon", centralised=True)
    for name in ("ditto", "apfl"):
        wanted = (
            "need a table of the private 'own.body.bias'"
            if name == "ditto"
            else "^APFL mixes one client's model"
        )
        with pytest.raises(MethodError, match=wanted):
            trained(name, centralised=True)


def test_a_configurations_adaptation_keeps_the_methods_loss() -> None:
    table = {"kind": "ditto", "lam": 0.5, "adapt": {"epochs": 2, "optimizer": {"learning_rate": 0.7}}}
    (phase,) = build_method(MethodConfig.model_validate(table)).adapt.phases
    assert phase.loss == methods.ditto(0.5).adapt.phases[0].loss
    assert (phase.epochs, phase.optimizer, phase.trains, phase.examples) == (2, sgd(0.7), "private", "all")
    table = {"kind": "fine_tuned", "adapt": {"epochs": 2}}
    assert build_method(MethodConfig.model_validate(table)).adapt.phases[0].trains == "all"
