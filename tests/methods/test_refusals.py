"""What FedAvg's and FURL's relatives refuse, and their parts of a configuration."""

from __future__ import annotations

import pytest
from torch import nn

from fedkeep import methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import MethodConfig
from fedkeep.methods import batch_norm_names
from fedkeep.methods.copies import with_copy
from tests.methods.table import trained
from tests.tiny import Logits, Noisy


def test_the_names_of_batch_normalisation() -> None:
    assert batch_norm_names(Noisy()) == (
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    )  # fmt: skip
    assert batch_norm_names(nn.BatchNorm1d(2, affine=False, track_running_stats=True))[0] == "running_mean"
    assert methods.fedbn(batch_norm_names(Noisy())).split.table(Noisy())[-1]["half"] == "federated"
    with pytest.raises(MethodError) as error:
        batch_norm_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    assert str(error.value) == "Sequential has no batch normalisation; without any, use methods.fedavg()."


def test_a_model_over_several_devices_is_refused_by_name() -> None:
    advice = (
        " is a DataParallel, which spreads every batch over several devices. Give the module that it holds (.module); "
        "simulate's device says where to train."
    )
    for model, who in (
        (nn.DataParallel(Logits()), "The model"),
        (nn.Sequential(nn.DataParallel(Logits())), "The layer '0'"),
    ):
        with pytest.raises(MethodError) as error:
            methods.fedavg().made_for(model)
        assert str(error.value) == who + advice


def test_copies_do_not_collide_and_leave_the_model_alone() -> None:
    model = Logits()
    names = list(model.state_dict())
    both = with_copy(model)
    assert list(both.state_dict()) == names + [f"own.{n}" for n in names]
    assert list(model.state_dict()) == names
    with pytest.raises(
        MethodError, match="^Logits has an attribute 'own', where this training method puts a part"
    ):
        with_copy(both)
    with pytest.raises(MethodError, match=r"^alpha must be in \[0, 1\]; got 1.5"):
        methods.apfl(1.5)


def test_centralised_training_refuses_what_it_cannot_do() -> None:
    with pytest.raises(
        MethodError, match="^'fedrecon' is stateless: its private values start from scratch in every round"
    ):
        trained("fedrecon", engine="pooled")
    for name in ("ditto", "apfl"):
        wanted = (
            "need a table of the private 'own.body.bias'"
            if name == "ditto"
            else "^APFL mixes one client's model"
        )
        with pytest.raises(MethodError, match=wanted):
            trained(name, engine="pooled")


def test_a_configurations_adaptation_keeps_the_methods_loss() -> None:
    table = {"kind": "ditto", "lam": 0.5, "adapt": {"epochs": 2, "optimizer": {"learning_rate": 0.7}}}
    (phase,) = build_method(MethodConfig.model_validate(table)).adapt.phases
    assert phase.loss == methods.ditto(0.5).adapt.phases[0].loss
    assert (phase.epochs, phase.optimizer, phase.trains, phase.examples) == (2, sgd(0.7), "private", "all")
    table = {"kind": "fine_tuned", "adapt": {"epochs": 2}}
    assert build_method(MethodConfig.model_validate(table)).adapt.phases[0].trains == "all"
