"""KTEPS and KTEPS⋆: numbers by hand, reductions as equalities, and both once more in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, Phase, methods, sgd, simulate
from fedkeep.core.declared import declared
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.net import Net
from fedkeep.core.seeds import generator
from fedkeep.methods.branches import TwoBranches
from fedkeep.methods.kteps import BranchLoss, PredictBranches, knowledge_transfer
from fedkeep.methods.terms import cross_entropy
from fedkeep.models import Linear, TextClassifier
from fedkeep.privacy import GaussianNoise, Projection
from tests.engines.reference import close, rows_of
from tests.methods.parts import Parts, State, Words, compare, descend, linear, plain_rounds
from tests.methods.test_dependence import hsic_written_out
from tests.refusals import raises
from tests.tiny import classes, everyone, same_bits, texts

DATA = classes()
TEXTS = texts(counts=(9, 4, 12), vocabulary=300)
LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.2, momentum=0.9))
SETTINGS: dict[str, Any] = {"rounds": 3, "cohort": 4, "seed": 3}


# --- by hand


def test_knowledge_transfer_by_hand() -> None:
    """(4 ln 3, 0) / 4 → (3/4, 1/4); the student's (ln 3, 0) → the same, (0, 0) → halves."""
    teacher = torch.tensor([[4 * math.log(3), 0.0]] * 2, dtype=torch.float64, requires_grad=True)
    student = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))  # 0.5623
    value = knowledge_transfer(teacher, student)
    assert value.item() == pytest.approx((entropy + math.log(2)) / 2, abs=1e-15)
    assert knowledge_transfer(teacher, student, torch.tensor([1.0, 0.0])).item() == pytest.approx(
        entropy, abs=1e-15
    )
    warm = knowledge_transfer(teacher, 4 * student, temperature=4.0, student_temperature=4.0)
    assert warm.item() == pytest.approx(value.item(), abs=1e-15)
    slopes = torch.autograd.grad(value, [teacher, student], allow_unused=True)
    assert slopes[0] is None
    torch.testing.assert_close(slopes[1], torch.tensor([[0.0, 0.0], [-0.125, 0.125]]).double())


class Plus(nn.Module):
    """Features are x, logits w ⊙ features, w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Scale()

    def features(self, x: Tensor) -> Tensor:
        return x

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def test_the_whole_loss_by_hand() -> None:
    """x = (ln 3, 0), label 0, private w = 2: −ln 3/4 − ln 9/10 + λ1 HSIC + λ2 L_kt."""
    branches = TwoBranches(projections=False)
    net = Net(branches(Plus()))
    params = {"classifier.w": torch.tensor(1.0).double(), "private.classifier.w": torch.tensor(2.0).double()}
    batch = {"x": torch.tensor([[math.log(3), 0.0]], dtype=torch.float64), "label": torch.tensor([0])}
    both = math.log(4 / 3) + math.log(10 / 9)
    teacher = 3**0.25 / (3**0.25 + 1)
    taught = -(teacher * math.log(0.9) + (1 - teacher) * math.log(0.1))
    value = float(BranchLoss(branches, diversity=0.5, transfer=0.1)(net, params, batch, {}))
    assert value == pytest.approx(both + 0.1 * taught, abs=1e-14)  # one example has no HSIC
    two = {n: torch.cat([v, torch.zeros_like(v)]) for n, v in batch.items()}
    value = float(BranchLoss(branches, diversity=0.5, transfer=0.0)(net, params, two, {}))
    diversity = (3 - math.exp(-2) - math.exp(-1) - math.exp(-0.5)) ** 2  # as in test_dependence
    assert value == pytest.approx((both + 2 * math.log(2)) / 2 + 0.5 * diversity, abs=1e-6)


def test_predictions_of_each_branch() -> None:
    branches = TwoBranches(projections=False)
    net = Net(branches(Plus()))
    params = {"classifier.w": torch.tensor(1.0).double(), "private.classifier.w": torch.tensor(2.0).double()}
    batch = {"x": torch.tensor([[1.0, -3.0]]).double()}
    for how, factor in (("s", 1.0), ("p", 2.0), ("sp", 1.5)):
        found = PredictBranches(branches, how)(net, params, batch)  # type: ignore[arg-type]
        assert found.tolist() == [[factor, -3 * factor]]


# --- what is added


@pytest.mark.parametrize(
    "copies", [("classifier",), ("encoder", "classifier"), ("embedding", "encoder", "classifier")]
)
def test_what_is_private_and_what_is_federated(copies: tuple[str, ...]) -> None:
    model = Words()
    names = set(model.state_dict())
    added = {"projection.weight", "projection.bias", "private.projection.weight", "private.projection.bias"}
    method = methods.kteps(copies=copies)
    wide = method.extend(model)
    method.check(wide)
    state = wide.state_dict()
    copied = {f"private.{n}" for n in names if n.partition(".")[0] in copies}
    assert set(state) == names | added | copied
    assert all(torch.equal(state[n], state[n.removeprefix("private.")]) for n in copied)
    assert set(method.split.private_names(state)) == copied | {n for n in added if n.startswith("private.")}
    assert not torch.equal(state["projection.weight"], state["private.projection.weight"])
    tables = {"embedding.weight", *(n for n in copied if "embedding" in n)}
    assert declared(wide).lookup == dict.fromkeys(tables, "text")
    assert set(TwoBranches(copies, projections=False)(model).state_dict()) == names | copied
    assert set(model.state_dict()) == names


def test_new_layers_depend_on_the_model_alone() -> None:
    build = TwoBranches()
    one = build(Parts()).state_dict()
    torch.rand(3)
    before = torch.get_rng_state()
    assert same_bits(one, build(Parts()).state_dict())
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one["projection.weight"], build(Parts(seed=9)).state_dict()["projection.weight"])


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MethodError, match="^Linear has no part 'classifier'.*'linear'"):
        methods.kteps().made_for(Linear(3, 3).double())
    with pytest.raises(MethodError, match="^Parts has an attribute.*'private'"):
        TwoBranches()(TwoBranches()(Parts()))
    with raises(MethodError, classifier="classifier", module="Plus"):
        TwoBranches()(Plus())

    class Headless(Parts):
        features = None  # type: ignore[assignment]

    with pytest.raises(MethodError, match="^The model's forward cannot be computed"):
        simulate(Headless().double(), methods.kteps(), DATA, rounds=1)


def test_one_class_and_clients_of_one_example_train() -> None:
    data = classes(counts=(1, 9, 5), labels=3)
    data.columns["label"][: data.rows(1, "train").stop] = 1  # type: ignore[index]
    run = simulate(
        Parts().double(),
        methods.kteps_star(1, 2, table="encoder.weight", local=Phase(batch_size=4)),
        data,
        rounds=2,
    )
    assert all(torch.isfinite(v).all() for v in run.server.values())


# --- reductions


def trained(method: Method, model: nn.Module | None = None, **options: Any) -> Any:
    return simulate((model or Parts()).double(), method, DATA, **{**SETTINGS, **options}).last


def test_every_component_is_kteps_up_to_rounding() -> None:
    options: dict[str, Any] = {"local": LOCAL, "noise": 0}
    plain = trained(methods.kteps(**options))
    for target in ("matrix", "delta"):
        star = methods.kteps_star(1, 3, table="encoder.weight", target=target, **options)  # type: ignore[arg-type]
        run = trained(star)
        close(run.server, plain.server, atol=1e-12)
        close(everyone(run.private, 6), everyone(plain.private, 6), atol=1e-12)
    less = trained(methods.kteps_star(2, 3, table="encoder.weight", **options))
    assert not torch.allclose(less.server["encoder.weight"], plain.server["encoder.weight"], atol=1e-3)


def test_options_change_what_they_name() -> None:
    base = trained(methods.kteps(0.5, 0.5, noise=0, local=LOCAL)).server["encoder.weight"]
    for options in ({"kernel": "median"}, {"temperature": 1}, {"copies": ("encoder", "classifier")}):
        other = methods.kteps(0.5, 0.5, noise=0, **options, local=LOCAL)  # type: ignore[arg-type]
        assert not torch.equal(base, trained(other).server["encoder.weight"])
    for diversity, transfer in ((0, 0.5), (0.5, 0)):
        other = methods.kteps(diversity, transfer, noise=0, local=LOCAL)
        assert not torch.equal(base, trained(other).server["encoder.weight"])


def test_the_upload_chain_of_each() -> None:
    assert methods.kteps().upload == (GaussianNoise(1e-3),)
    assert methods.kteps(noise=0).upload == ()
    assert methods.kteps_star().upload == (Projection(2, 150), GaussianNoise(1e-3))
    star = methods.kteps_star(1, 2, table="w", target="delta", noise=0, tables="local")
    assert (star.upload, star.client.tables) == ((Projection(1, 2, "w", "delta"),), "local")
    assert methods.kteps_star(noise=0.5).but(name="kteps", upload=(GaussianNoise(0.5),)) == methods.kteps(
        noise=0.5
    )


# --- bytes


def test_what_kteps_star_sends_is_counted_to_the_byte() -> None:
    """Per client: its rows' numbers and W V of them, V, and the rest of the shared part."""
    torch.manual_seed(0)
    model = TextClassifier(300, 3, embedding_dim=6, hidden=4)
    for method, kept in ((methods.kteps(), None), (methods.kteps_star(2, 4), 3)):
        run = simulate(model, method, TEXTS, rounds=1, cohort=3)
        rest = sum(v.numel() for n, v in run.server.items() if n != "embedding.weight")
        sizes = []
        for client in range(3):
            ids = TEXTS.columns["text"].take(rows_of(TEXTS, client)).values  # type: ignore[union-attr]
            rows = len({0, *ids.tolist()})
            sizes.append(8 * rows + 4 * (rest + (6 * rows if kept is None else kept * rows + 6 * kept)))
        (sent,) = [r.value for r in run.history if r.metric == "upload_bytes"]
        assert sent == round(float(np.mean(sizes)))


def test_a_projection_that_does_not_fit_the_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^A projection on the.*2.*150"):
        trained(methods.kteps_star(table="encoder.weight"))
    with pytest.raises(ConfigError, match="^The projection's table.*'encoder.wait'.*'encoder.weight'"):
        trained(methods.kteps_star(table="encoder.wait"))
    with pytest.raises(ConfigError, match="^A projection keeps the.*1"):
        methods.kteps_star(5, 4)


def test_a_projection_on_too_many_components_is_refused_before_any_training() -> None:
    model = TextClassifier(20, 2, embedding_dim=6, hidden=3)
    with pytest.raises(ConfigError, match=r"wants a table of shape \(n,.*150.*20.*6"):
        simulate(model, methods.kteps_star(), TEXTS, rounds=0, cohort=3)


# --- plain PyTorch


def plain_loss(w: State, batch: State) -> Tensor:
    """Return eq. 9 with λ1 = 0.7, λ2 = 0.3 and T = 3."""
    h = torch.tanh(linear(w, "encoder", batch["x"]))
    a, b = linear(w, "projection", h), linear(w, "private.projection", h)
    g_s, g_p = linear(w, "classifier", a), linear(w, "private.classifier", b)
    ce = sum((nn.functional.cross_entropy(g, batch["label"]) for g in (g_s, g_p)), torch.zeros(()))
    teacher = nn.functional.softmax(g_s.detach() / 3.0, -1)
    taught = -(teacher * nn.functional.log_softmax(g_p, -1)).sum() / len(h)
    return ce + 0.7 * plain_hsic(a, b) + 0.3 * taught


def plain_hsic(a: Tensor, b: Tensor) -> Tensor:
    n = len(a)
    if n == 1:
        return torch.zeros((), dtype=torch.float64)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    kernels = []
    for x in (a, b):
        distance = (x[:, None] - x[None]).pow(2).sum(-1)
        scale = float(distance.detach().sum()) / (n * (n - 1)) + 1e-8
        kernels.append(
            sum((torch.exp(-distance / (m * scale)) for m in (0.5, 1, 2)), torch.zeros(()).double())
        )
    return torch.trace(kernels[0] @ centre @ kernels[1] @ centre) / (n - 1) ** 2


def compressed(w: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return W V Vᵀ, V by singular values of the centred matrix."""
    _, _, right = np.linalg.svd(w - w.mean(0), full_matrices=True)
    v = right[start - 1 : end].T
    return np.asarray(w @ v @ v.T)


@pytest.mark.parametrize("name", ["kteps", "kteps_star", "noise"])
def test_three_rounds_equal_plain_pytorch(name: str) -> None:
    options: dict[str, Any] = {"local": LOCAL, "diversity": 0.7, "transfer": 0.3, "temperature": 3}
    star = {"start": 2, "end": 3, "table": "encoder.weight"} if name == "kteps_star" else {}
    sigma = 0.01 if name == "noise" else 0.0
    method = methods.METHODS["kteps_star" if star else "kteps"](noise=sigma, **star, **options)
    run = trained(method)
    initial = TwoBranches()(Parts().double()).state_dict()

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        state = descend(state, [""], batches, plain_loss, 0.2, 0.9)
        if star:
            state["encoder.weight"] = torch.from_numpy(compressed(state["encoder.weight"].numpy(), 2, 3))
        draw = generator(3, "upload/0", DATA.ids[c], number)
        for n in sorted(received) if sigma else ():
            state[n] = state[n] + sigma * torch.randn(state[n].shape, generator=draw, dtype=torch.float64)
        return state

    compare(run, *plain_rounds(DATA, method, initial, train))
    assert not torch.equal(run.server["encoder.weight"], initial["encoder.weight"])


def test_the_reference_agrees_with_the_formula_written_out() -> None:
    a, b = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert float(plain_hsic(a, b)) == pytest.approx(hsic_written_out(a, b, (0.5, 1, 2)), rel=1e-10)


def test_the_shared_part_predicts_with_the_shared_branch() -> None:
    run = trained(methods.kteps(local=LOCAL))
    shared, own = run.evaluate(stage="shared"), run.evaluate()
    branches = TwoBranches()
    assert run.method.predict_shared == PredictBranches(branches, "s")
    run.method = run.method.but(predict=PredictBranches(branches, "s"))
    assert run.evaluate() == shared != own


def test_clients_side_by_side_have_the_same_medians() -> None:
    method = methods.kteps(0.5, noise=0, kernel="median", local=LOCAL)
    close(trained(method, engine="vectorised").server, trained(method).server, atol=1e-12)


def test_the_losss_terms_are_those_that_are_asked_for() -> None:
    term = methods.kteps(0.2, 0.3, local=Phase(loss=2 * cross_entropy())).client.phases[0].loss
    assert term == BranchLoss(TwoBranches(), 2 * cross_entropy(), 0.2, 0.3)
    assert not term.reads_parameters
    assert BranchLoss(loss=cross_entropy() + methods.terms.l2_penalty("*")).reads_parameters
