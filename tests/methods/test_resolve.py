"""Methods on models that name no parts for them: the values of the same model with the parts that they speak of."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.heads import FOUND, Head
from fedkeep.core.net import Net
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.simulate import Simulation
from fedkeep.methods import resolve
from fedkeep.methods.features import pooled
from fedkeep.privacy import Projection
from tests.tiny import classes

DATA = classes(kind="f4")
LOCAL = Phase(batch_size=4, merge_single=True, optimizer=sgd(0.2, momentum=0.9))
NAMES = {"body": "encoder", "scorer": "classifier"}
"""The parts of the stranger's model, and what methods call them."""


class Stranger(nn.Module):
    """Nothing in it is named for fedkeep."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            self.scorer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scorer(torch.tanh(self.body(x)))


class Named(nn.Module):
    """The same model with the two steps."""

    def __init__(self) -> None:
        super().__init__()
        own = Stranger()
        self.encoder, self.classifier = own.body, own.scorer

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Afterwards(Stranger):
    """What follows the head holds no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.log_softmax(super().forward(x), 1)


class NamedAfterwards(Named):
    """The same."""

    def head(self, features: Tensor) -> Tensor:
        return nn.functional.log_softmax(super().head(features), 1)


def trained(model: nn.Module, method: Method, data: FederatedData = DATA, **options: Any) -> Run:
    given = {"rounds": 3, "cohort": 4, "seed": 2, "engine": "sequential", **options}
    return simulate(model, method, data, progress=False, **given)


def renamed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return values of the stranger's model under the named one's names."""
    found = {}
    for name, value in values.items():
        words = [NAMES.get(word, word) for word in name.split(".")]
        found[".".join(words)] = value
    return found


SPLIT = {
    "fedper": "classifier.*",
    "fedrep": "classifier.*",
    "fedbabu": "classifier.*",
    "fedala": "classifier.*",
}
BY_STEPS = ["moon", "fedmmd", "feddbe", "fedrod", "gpfl", "fedproto", "fedpac", "fedcp", "kteps", "knn_per"]
BY_STEPS += ["fedfusion", "pfl_da"]


def made(name: str, **given: Any) -> Method:
    build: Any = getattr(methods, name)
    quiet = {"noise": 0.0} if name == "kteps" else {}  # noise is drawn by names
    return build(local=LOCAL, **quiet, **given)  # type: ignore[no-any-return]


def same(one: Run, other: Run) -> None:
    """Assert that two runs, of the stranger's and of the named model, hold the same bits."""
    mine = renamed(one.server)
    assert mine.keys() == other.server.keys()
    for name, value in other.server.items():
        assert torch.equal(mine[name], value), name
    for client in DATA.ids:
        kept, wanted = (run.kept(str(client)) for run in (one, other))
        own = renamed(kept.params)
        assert own.keys() == wanted.params.keys()
        assert all(torch.equal(own[n], v) for n, v in wanted.params.items())
    losses = [[r.value for r in run.history if r.metric == "loss"] for run in (one, other)]
    assert losses[0] == losses[1]
    assert one.evaluate("test") == other.evaluate("test")


@pytest.mark.parametrize("name", [*SPLIT, "lg_fedavg"])
def test_a_split_by_what_was_found_is_the_split_by_names(name: str) -> None:
    pattern = SPLIT.get(name, "encoder.*")
    argument = "layers" if name == "fedala" else "private"
    same(trained(Stranger(), made(name)), trained(Named(), made(name, **{argument: pattern})))


SENT = ("fedper", "fedala", "fedproto", "kteps")
"""What workers are sent of a fitted model is the same for all methods."""


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw added layers from one stream: elsewise the names of a model's parts name it, too."""
    monkeypatch.setattr("fedkeep.methods.added_parts.digest", lambda _: "1" * 64)


@pytest.mark.usefixtures("one_stream")
@pytest.mark.parametrize("name", BY_STEPS)
def test_features_that_are_caught_give_the_bits_of_two_steps(name: str) -> None:
    same(trained(Stranger(), made(name)), trained(Named(), made(name)))


@pytest.mark.usefixtures("one_stream")
@pytest.mark.parametrize("name", BY_STEPS)
def test_what_follows_the_head_is_computed_with_it(name: str) -> None:
    run, other = trained(Afterwards(), made(name)), trained(NamedAfterwards(), made(name))
    assert run.method.head == Head(layer="scorer", last=False)
    mine = renamed(run.server)
    torch.testing.assert_close(mine, other.server)


class Pointwise(Stranger):
    """Its head is a convolution of points."""

    def __init__(self) -> None:
        super().__init__()
        linear, self.scorer = self.scorer, nn.Conv1d(4, 3, 1)  # type: ignore[assignment]
        self.scorer.load_state_dict({"weight": linear.weight.unsqueeze(2), "bias": linear.bias})

    def forward(self, x: Tensor) -> Tensor:
        return self.scorer(torch.tanh(self.body(x)).unsqueeze(2)).squeeze(2)


@pytest.mark.usefixtures("one_stream")
@pytest.mark.parametrize("name", [*BY_STEPS, "furl"])
def test_a_head_that_is_a_convolution_of_points_is_as_a_linear_one(name: str) -> None:
    run, other = (trained(model, made(name)).server for model in (Pointwise(), Stranger()))
    found = {n: v.reshape(other[n].shape) for n, v in run.items()}
    torch.testing.assert_close(found, other, atol=2e-05, rtol=0.0001)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("vectorised", name) for name in (*SPLIT, *BY_STEPS)),
        *(
            pytest.param("workers", name, marks=() if name in SENT else pytest.mark.slow)
            for name in (*SPLIT, *BY_STEPS)
        ),
    ],
)
def test_every_link_gives_the_same(name: str, engine: str) -> None:
    model = Stranger() if engine == "workers" else Afterwards()
    mine, other = (trained(model, made(name), engine=e) for e in ("sequential", engine))
    torch.testing.assert_close(other.server, mine.server, atol=2e-05, rtol=0.0001)


def test_a_users_vector_is_that_of_a_head_which_is_given_it_beside_its_features() -> None:
    """Furl on a plain model begins as fedavg, and moves as the same model whose head has columns for the vector."""
    start, moved = (trained(Stranger(), made("furl"), rounds=rounds) for rounds in (0, 3))
    x = {"x": torch.linspace(-1, 1, 12).reshape(4, 3)}
    start.net.train(False)
    plain = Stranger().eval()
    assert torch.equal(start.net(start.net.initial(), x), plain(x["x"]))
    assert moved.method.split.private == ("scorer.user", "scorer.user_bias")
    assert "scorer.user_weight" in moved.server
    assert "scorer.user" not in moved.server
    kept = moved.kept("user-1").params
    assert all(bool(kept[name].any()) for name in ("scorer.user", "scorer.user_bias"))

    class Joined(Stranger):
        """The vector joined to the features."""

        def __init__(self) -> None:
            super().__init__()
            first = start.net.initial()
            self.user, self.bias = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(3))
            self.scorer = nn.Linear(12, 3)
            with torch.no_grad():
                self.scorer.weight.copy_(torch.cat([first["scorer.weight"], first["scorer.user_weight"]], 1))
                self.scorer.bias.copy_(first["scorer.bias"])

        def forward(self, x: Tensor) -> Tensor:
            found = torch.cat([torch.tanh(self.body(x)), self.user.expand(len(x), -1)], 1)
            return self.scorer(found) + self.bias

    joined = trained(Joined(), made("furl", private=("user", "bias")))
    torch.testing.assert_close(joined.kept("user-1").params["user"], kept["scorer.user"])
    weight = torch.cat([moved.server["scorer.weight"], moved.server["scorer.user_weight"]], 1)
    torch.testing.assert_close(joined.server["scorer.weight"], weight)


def test_batch_normalisation_is_found_by_type() -> None:
    same(trained(Stranger(), made("fedbn")), trained(Named(), made("fedbn", private="encoder.1.*")))
    with pytest.raises(MethodError, match="no batch normalisation"):
        made("fedbn").resolved(nn.Linear(3, 3))


class TwoNorms(nn.Module):
    """Two layers of batch normalisation, of which one has another name, beside one of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.bn2, self.norm3 = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.LayerNorm(3)
        self.scorer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scorer(self.norm3(self.bn2(self.norm1(x))))


def test_batch_normalisation_of_another_name_beside_a_usual_one_is_private_too() -> None:
    method = made("fedbn").resolved(TwoNorms())
    assert method.split.private == ("norm1.*", "bn2.*")
    assert {n.partition(".")[0] for n in trained(TwoNorms(), made("fedbn")).server} == {"norm3", "scorer"}


def test_layers_are_named_by_their_type_in_splits_rates_and_decays() -> None:
    kinds = sgd(0.1, rates={"type:Linear": 0.3}, weight_decay={"type:LayerNorm": 0.0, "*": 0.1})
    names = sgd(0.1, rates={"scorer.*": 0.3}, weight_decay={"norm3.*": 0.0, "*": 0.1})
    private = (("type:BatchNorm1d", "type:LayerNorm"), ("norm1.*", "bn2.*", "norm3.*"))
    one, two = (
        methods.fedper(split, local=LOCAL.but(optimizer=steps)).resolved(TwoNorms())
        for split, steps in zip(private, (kinds, names), strict=True)
    )
    assert one == two
    assert set(trained(TwoNorms(), methods.fedper("type:LayerNorm", local=LOCAL)).kept("user-1").params) == {
        "norm3.weight",
        "norm3.bias",
    }
    with pytest.raises(MethodError, match="'type:GRU'.*BatchNorm1d, LayerNorm, Linear"):
        methods.fedper("type:GRU").resolved(TwoNorms())


def test_what_a_function_is_given_is_renamed_too() -> None:
    given = partial(print, "classifier", sep="classifier")
    made = resolve.renamed(given, {"classifier": ("scorer",)})
    assert (made.args, made.keywords) == (("scorer",), {"sep": "scorer"})
    assert resolve.renamed(partial(print, "x", sep="classifier"), {"classifier": ("scorer",)}).keywords == {
        "sep": "scorer"
    }
    assert resolve.renamed(given, {"head": ("scorer",)}) is given


class Spoken(nn.Module):
    """Tables of words by names of its own."""

    def __init__(self, *tables: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.tables = nn.ModuleDict({name: nn.Embedding(7, 4) for name in tables})
            self.scorer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = next(iter(self.tables.values())).weight if self.tables else torch.eye(7, 4).to(x)
        return self.scorer(torch.tanh(x @ first[:3]))


def test_a_table_of_words_is_found_by_type() -> None:
    star = methods.kteps_star(1, 2, local=LOCAL)
    found = trained(Spoken("words"), star)
    assert found.method.upload[0] == Projection(1, 2, "tables.words.weight")
    named = trained(Spoken("words"), methods.kteps_star(1, 2, table="tables.words.weight", local=LOCAL))
    assert all(torch.equal(v, named.server[n]) for n, v in found.server.items())
    with pytest.raises(MethodError, match=r"table='tables.words.weight'.*kteps"):
        trained(Spoken("words", "places"), star)
    with pytest.raises(MethodError, match="no table of words.*kteps"):
        trained(Stranger(), star)


def test_with_batch_normalisation_no_last_mini_batch_has_one_example() -> None:
    """Five examples in mini-batches of four; also where a method's own hook trains, as FedALA's."""
    short = classes(counts=(5, 9, 8), kind="f4")
    for name in ("fedavg", "fedala", "pfedme", "per_fedavg", "mixture"):
        build: Any = getattr(methods, name)
        run = trained(Stranger(), build(local=Phase(batch_size=4)), short, cohort=3)
        assert all(phase.merge_single for phase in run.method.client.phases)
    kept = methods.fedavg(local=Phase(batch_size=4, merge_single=False))
    with pytest.raises(MethodError, match="batch of 1 example"):
        trained(Stranger(), kept, short, cohort=3)
    plain = nn.Sequential(nn.Linear(3, 3))
    assert methods.fedavg().resolved(plain).client.phases[0].merge_single is None


def test_pfedme_gathers_the_statistics_of_its_shared_model() -> None:
    run = trained(Stranger(), methods.pfedme(local=LOCAL.but(batch_size=100)), rounds=1, cohort=1)
    model, mean = Stranger(), "body.1.running_mean"
    for client in range(len(DATA)):
        one = Stranger()
        one(torch.from_numpy(DATA.columns["x"][DATA.rows(client, "train")]))
        if torch.allclose(one.state_dict()[mean], run.server[mean]):
            break
    else:
        raise AssertionError("no client's statistics")
    assert not torch.equal(run.server[mean], model.state_dict()[mean])
    assert int(run.server["body.1.num_batches_tracked"]) == 1


class Zeros(Stranger):
    """Its head starts at zero, as torchvision's ViT has it."""

    def __init__(self, name: str = "scorer") -> None:
        super().__init__()
        for value in self.scorer.parameters():
            nn.init.zeros_(value)
        self.name = name
        self.add_module(name, self.scorer)
        if name != "scorer":
            del self.scorer

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(torch.tanh(self.body(x)))


@pytest.mark.parametrize("name", ["scorer", "head"])
def test_fedbabu_draws_a_head_of_zeros_anew(name: str) -> None:
    model = Zeros(name)
    run = trained(model, made("fedbabu"), rounds=1)
    assert not torch.equal(run.server["body.0.weight"], model.body[0].weight)  # type: ignore[arg-type]
    assert bool(run.net.initial()[f"{name}.weight"].any())
    assert not bool(model.get_parameter(f"{name}.weight").any())
    assert "drawn anew" in run.method.tells_head(model)
    assert "drawn anew" not in trained(Stranger(), made("fedbabu"), rounds=0).method.tells_head(Stranger())
    assert trained(model, made("fedper"), rounds=0).method.extend is None  # its rounds train the head


class Plain(nn.Module):
    """No statistics, and something after the head."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.body, self.scorer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scorer(torch.tanh(self.body(x))).log_softmax(1)


def test_asp_mtl_gives_each_client_all_before_the_head_and_a_head_of_both_features() -> None:
    run = trained(Plain(), methods.asp_mtl(tasks=6), centralised=True, engine="auto", cohort=None)
    own = run.kept("user-1").params
    prefix = "private."
    assert own.keys() == {
        f"{prefix}{n}"
        for n in ("encoder.body.weight", "encoder.body.bias", "classifier.weight", "classifier.bias")
    }
    assert own["private.classifier.weight"].shape == (3, 8)
    params, x = {**run.server, **own}, torch.linspace(-1, 1, 12).reshape(4, 3)
    run.net.train(False)
    s, p = (
        torch.tanh(nn.functional.linear(x, params[f"{at}body.weight"], params[f"{at}body.bias"]))
        for at in ("", "private.encoder.")
    )
    wanted = nn.functional.linear(
        torch.cat([s, p], 1), own["private.classifier.weight"], own["private.classifier.bias"]
    )
    torch.testing.assert_close(run.method.predict(run.net, params, {"x": x}), wanted)
    first = run.net.initial()
    assert all(not torch.equal(own[n], first[n]) for n in own)
    with pytest.raises(MethodError, match="group or layer normalisation"):
        trained(Stranger(), methods.asp_mtl(tasks=6), centralised=True, engine="auto", cohort=None)


def decoder(model: nn.Module) -> Any:
    return model.scorer


def test_a_head_is_a_name_a_layer_or_a_function() -> None:
    model = Stranger()
    for given in ("scorer", "sc*", model.scorer, decoder, lambda m: m.scorer):
        found = made("fedper").but(head=given).resolved(model)
        assert found.head == Head(layer="scorer")
        assert found.split.private == ("scorer.*",)
    for wrong in (nn.Linear(4, 3), lambda m: None):
        with pytest.raises(MethodError, match="none of its layers"):
            made("fedper").but(head=wrong).resolved(model)


def test_a_model_that_is_all_head_says_that_nothing_is_federated() -> None:
    run = trained(nn.Sequential(nn.Linear(3, 3)), made("fedper"))
    assert run.server == {}
    assert "nothing is federated" in run.method.tells_head(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(MethodError, match="nothing that is trained is before"):
        trained(nn.Sequential(nn.Linear(3, 3)), made("fedpac"))


class WideAndDeep(Stranger):
    """Two layers whose outputs are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + super().forward(x)


def test_a_run_says_what_joins_the_output_beside_its_head() -> None:
    lines = [
        Simulation(m, made("fedper"), DATA, RunSettings(rounds=1)).head for m in (WideAndDeep(), Stranger())
    ]
    assert lines[0].startswith("head: scorer (15 numbers), private with fedper; 'wide' ")
    assert "head='NAME'" in lines[0]
    assert lines[1] == "head: scorer (15 numbers), private with fedper"


def test_a_head_is_named_where_there_is_nothing_to_find_it_on() -> None:
    with pytest.raises(MethodError, match="head='NAME'"):
        made("fedper").resolved(Stranger())
    named = made("fedper").but(head="scorer").resolved(Stranger())
    assert named.split.private == ("scorer.*",)
    assert named.tells_head(Stranger()) == "head: scorer (15 numbers), private with fedper"


def test_positions_that_are_padding_do_not_count() -> None:
    module = Stranger()
    found = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for pool, wanted in (
        ("mean", [[2.0, 3.0], [7.0, 8.0]]),
        ("first", [[0.0, 1.0], [6.0, 7.0]]),
        ("last", [[4.0, 5.0], [8.0, 9.0]]),
    ):
        setattr(module, FOUND, Head(layer="scorer", pool=pool))  # type: ignore[arg-type]
        for batch in ({"text_length": mask.sum(1)}, {"text_mask": mask}, {"mask": mask}):
            assert pooled(Net(module), found, batch).tolist() == wanted
    images = torch.arange(16.0).reshape(2, 2, 2, 2)  # features last
    assert pooled(Net(module), images, {}).tolist() == [[3.0, 4.0], [11.0, 12.0]]


def test_a_mixture_is_made_of_a_plain_model() -> None:
    """Rounds are fedavg's of the model; experts begin as copies, and both are mixed by a gate of one output."""
    mixed, alone = trained(Stranger(), made("mixture")), trained(Stranger(), made("fedavg"))
    assert {
        n.removeprefix("global_expert."): v for n, v in mixed.server.items()
    }.keys() == alone.server.keys()
    for name, value in alone.server.items():
        assert torch.equal(mixed.server[f"global_expert.{name}"], value)
    assert mixed.method.split.private == ("local_expert.*", "gate.*")
    start = mixed.method.adapt.start
    params = {**mixed.net.initial(), **mixed.server}
    own = start(params)
    assert torch.equal(own["local_expert.scorer.weight"], mixed.server["global_expert.scorer.weight"])
    mixed.net.train(False)
    output = mixed.net(params, {"x": torch.linspace(-1, 1, 12).reshape(4, 3)})
    torch.testing.assert_close(output.exp().sum(1), torch.ones(4))
