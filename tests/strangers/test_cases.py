"""The kinds of modules and surroundings that once went wrong, by row: right, or refused by name.

``modules.py`` has the modules that train as their author's own loop does, ``KINDS`` some more; ``CASES`` has the others.
F10 stands below; F19, proxies of the environment, in ``tests/flower/test_supernode.py``.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, Run, Split, adam, load_model, methods, sgd, simulate
from fedkeep.core.copying import copied
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MethodError, RunError, SplitError
from fedkeep.core.net import float_type
from fedkeep.core.params import Params
from fedkeep.data import toy
from fedkeep.data.readers import read_table
from fedkeep.privacy import GaussianNoise
from tests.refusals import raises
from tests.strangers.loops import row
from tests.strangers.modules import InPlace, Recomputed, Reentrant, Stranger, Two, numbers
from tests.tiny import same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop.*_weight_norm:UserWarning"),
]

RATE, EPOCHS, ROUNDS = 0.3, 2, 2
LOCAL = Phase(batch_size=16, epochs=EPOCHS, optimizer=sgd(RATE))


def data(clients: int = 1) -> FederatedData:
    rng, rows = np.random.default_rng(0), 16 * clients
    columns = {"x": rng.standard_normal((rows, 6)), "label": rng.integers(0, 3, rows)}
    splits = (["train"] * 12 + ["test"] * 4) * clients
    return FederatedData.from_columns(np.repeat(np.arange(clients), 16), columns, splits)


class Deep(Two):
    def more(self) -> None:
        def first(x: Tensor) -> Any:
            return self.a(x)

        def second(x: Tensor, before: Callable[[Tensor], Tensor] = first) -> Any:
            return self.b(torch.tanh(before(x)))

        self.steps = {"all": [second]}

    def forward(self, x: Tensor) -> Any:
        return self.steps["all"][0](x)


class Bound(Two):
    def more(self) -> None:
        self.run = self.inner

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Partial(Two):
    def more(self) -> None:
        self.run = functools.partial(Two.inner, self)

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class ListedWeight(Two):
    def more(self) -> None:
        self.again = [self.a.weight]

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(x @ self.again[0].T + self.a.bias))


class AllHooks(Two):
    def more(self) -> None:
        self.a.register_forward_hook(lambda _, __, output: output * self.b.bias.sum().exp())
        self.register_forward_pre_hook(lambda _, given: (given[0] * 2,) if given else None)
        self.register_forward_hook(lambda _, __, output: output * 0.5)


class ParameterHook(Two):
    def more(self) -> None:
        self.a.weight.register_hook(lambda slope: slope * 0.1)
        self.b.weight.register_hook(lambda slope: slope + self.b.bias.detach().sum())


class LossFirst(Two):
    """As transformers' models, which put a loss first where labels are given."""

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        output = self.inner(x)
        return output if label is None else (nn.functional.cross_entropy(output, label), output)


class SpectralRoot(Two):
    """An own call that gives every pass a new norm, in a hook on the root."""

    def more(self) -> None:
        self.mix = nn.Parameter(torch.randn(6, 6))
        nn.utils.spectral_norm(self, "mix")

    def forward(self, x: Tensor) -> Any:
        return self.inner(x @ self.mix)


KINDS = (AllHooks, ParameterHook, SpectralRoot, Deep, Bound, Partial, ListedWeight, LossFirst)
ALONE = (ParameterHook, SpectralRoot, ListedWeight)
"""Kinds that cannot be trained side by side."""


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind()


def wide(kind: Any) -> Any:
    return made(kind).double()


def trained(module: nn.Module, engine: Any = "sequential", clients: int = 1, **settings: Any) -> Run:
    method = settings.pop("method", methods.fedavg(local=LOCAL))
    return simulate(module, method, data(clients), rounds=ROUNDS, engine=engine, seed=1, **settings).last


@pytest.mark.parametrize("kind", KINDS)
def test_clients_train_as_the_authors_own_loop(kind: type[Two]) -> None:
    found = row(Stranger(kind, numbers(6)), "fedavg", ("sequential", "workers", "vectorised"))
    wanted = "refused: ConfigError" if kind in ALONE else "equal"
    assert (found["sequential"], found["workers"]) == ("equal", "equal")
    assert found["vectorised"].startswith(wanted), found


@pytest.mark.parametrize("kind", [Recomputed, Reentrant, InPlace])
@pytest.mark.parametrize("method", [methods.pfedme, methods.per_fedavg, methods.apfl, methods.ditto])
def test_where_a_loss_runs_the_model_twice_too(kind: type[Two], method: Any) -> None:
    class Plain(Two):
        features, head = (lambda self, x: torch.tanh(self.a(x))), (lambda self, features: self.b(features))

    class Odd(kind, Plain):  # type: ignore[misc, valid-type]
        pass

    class Thrice(Plain):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x * 0.5)

    even = Thrice if kind is InPlace else Plain
    runs = [trained(wide(one), clients=3, method=method(local=LOCAL)) for one in (even, Odd)]
    assert same_bits(runs[0].server, runs[1].server)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_trains_the_same(off: Any) -> None:
    with off():
        module = wide(Two)
        run = trained(module)
    assert same_bits(run.server, trained(wide(Two)).server)


class Cached(Two):
    """Keeps what it computed last."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(x)
        return self.last


def test_a_model_that_keeps_what_it_computed_is_copied_as_the_error_says() -> None:
    module = wide(Cached)
    module(torch.ones(1, 6).double())
    with pytest.raises(MethodError, match="'last'.*None"):
        trained(module)
    module.last = None
    assert same_bits(trained(module).server, trained(wide(Two)).server)


def test_the_users_own_module_stays_as_it_was() -> None:
    module = wide(ParameterHook)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    trained(module)
    assert same_bits(before, module.state_dict())
    assert len(module.a.weight._backward_hooks) == 1


def test_a_copy_shares_nothing_with_its_original() -> None:
    module = wide(Deep)
    copy = copied(module)
    with torch.no_grad():
        for value in module.parameters():
            value.zero_()
    assert copy(torch.ones(1, 6).double()).abs().sum() > 0


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    module = wide(Two)
    module.a.weight.register_post_accumulate_grad_hook(lambda _: None)
    with raises(MethodError, name="a.weight"):
        trained(module)


class Teacher(Two):
    """A slow copy that follows by ``.data``, as MoCo's and BYOL's do."""

    def more(self) -> None:
        self.k = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.k.weight.data.mul_(0.5).add_(self.a.weight.data, alpha=0.5)
        return self.b(torch.tanh(self.a(x)) + torch.tanh(self.k(x)))


class Viewed(Two):
    """Counts in a buffer through numpy."""

    def more(self) -> None:
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.count.numpy()[:] += 1
        return self.inner(x)


class Halves(Two):
    """A frozen 16-bit factor before layers of 32 bits."""

    def more(self) -> None:
        self.factor = nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.inner((x - 1000) * self.factor.float())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_f10_inputs_are_rounded_to_few_bits_only_where_all_parameters_are() -> None:
    module = made(Halves)
    assert [float_type(m) for m in (module, wide(Two), Two().bfloat16())] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]
    far = data()
    far.columns["x"] = np.asarray(far.columns["x"]) + 1000
    run = simulate(module, methods.fedavg(local=LOCAL), far, rounds=1, engine="sequential")
    test = far.batch(far.split_rows("test"))
    module.load_state_dict(run.parameters("0"))
    loss = nn.functional.cross_entropy(module(test["x"].float()), test["label"])
    assert run.evaluate("test")["loss"] == pytest.approx(float(loss), rel=1e-5)


TOY = toy(users=6, examples=40)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Wrapper(nn.Module):
    """Hands on whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, **columns: Tensor) -> Any:
        return self.net(**columns)


class Peeks(Wrapper):
    """Would read the label where it is given one."""

    def forward(self, x: Tensor, **more: Tensor) -> Any:
        return self.net(x) + 9 * nn.functional.one_hot(more["label"], 3)


def toyed(module: nn.Module, engine: Any = "sequential", method: Any = None) -> Params:
    run = simulate(
        module, method or methods.fedavg(), TOY, rounds=2, engine=engine, seed=1, device="cpu"
    ).last
    assert run.evaluate("test")["loss"] < 2
    return run.server


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return torch.ao.quantization.quantize_dynamic(Net())


def exported() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.export.export(Net(), (torch.randn(9, 4),)).module()


def bare(values: Params) -> Params:
    return {name.removeprefix("net."): value for name, value in values.items()}


class Zeroed(Net):
    """Features that count for nothing, though a gradient flows through them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x) * 0)


class Taken(Net):
    """Attributes of its author's own, called as fedkeep's declarations are."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.updated_buffers, self.per_example = nn.Embedding(9, 8), True, None

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x) + self.lookup(x[:, 0].long().abs() % 9))


def refused(kind: type[FedkeepError], module: nn.Module, **settings: Any) -> FedkeepError:
    with pytest.raises(kind) as error:
        toyed(module, **settings)
    return error.value


def written_unseen() -> None:
    for kind, name in ((Teacher, "k.weight"), (Viewed, "count")):
        for engine in ("sequential", "workers"):
            with pytest.raises(SplitError, match=name):
                trained(wide(kind), engine)


def default_device() -> None:
    for engine in ("sequential", "vectorised", "workers"):
        wanted, module = toyed(made(Net), engine), made(Net)
        torch.set_default_device("meta")
        try:
            found = toyed(module, engine)
        finally:
            torch.set_default_device(None)
        assert same_bits(found, wanted)


def threads() -> None:
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(1)

    def drops() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    wanted, thread = toyed(made(Net)), threading.Thread(target=draw)
    modules = made(Net), made(drops)
    thread.start()
    try:
        assert same_bits(toyed(modules[0]), wanted)
        assert "another thread" in str(refused(MethodError, modules[1]))
    finally:
        done.set()
        thread.join()


def gradients_of_zero() -> None:
    names = [f"features.0.{name}" for name in ("bias", "weight")]
    steps = Phase(batch_size=8)
    for engine in ("sequential", "vectorised", "workers", "auto"):
        error = refused(
            MethodError, made(Zeroed), engine=engine, method=methods.fedper("classifier.*", local=steps)
        )
        assert (error.facts["group"], error.facts["names"]) == ("federated", names)
    own = refused(MethodError, made(Zeroed), method=methods.fedper("features.*", local=steps))
    assert own.facts["group"] == "private"


def kwargs_forward() -> None:
    found = {name.removeprefix("net."): value for name, value in toyed(made(Wrapper)).items()}
    assert same_bits(found, toyed(made(Net)))
    assert "there is no 'label'" in str(refused(MethodError, made(Peeks)))


def attribute_names() -> None:
    moved = toyed(made(Taken))
    assert not torch.equal(moved["lookup.weight"], made(Taken).lookup.weight)


def features_layer() -> None:
    for name in ("moon", "fedrod", "fedproto", "knn_per", "fedpac", "kteps"):
        toyed(made(Net), method=getattr(methods, name)())


def graph_module() -> None:
    assert same_bits(toyed(made(lambda: torch.fx.symbolic_trace(Net()))), toyed(made(Net)))
    for kind in (quantised, exported):
        refused(MethodError, made(kind))


def labels_spaces() -> None:
    rows = [
        "a,1,yes,train",
        "a,2, yes,train",
        "a ,3,no,train",
        "b,4,no,train",
        "1,5,yes,train",
        "1.0,6,no,train",
    ]
    Path("rows.csv").write_text("\n".join(["user,x,label,split", *rows, "b,8,yes.,test"]) + "\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        read = read_table("rows.csv", user="user", features=["x"], label="label")
        simulate(nn.Linear(1, 4), methods.fedavg(), read, rounds=1)
    every = " ".join(str(each.message) for each in said)
    assert not [name for name in ("'1.0'", "'a '", "' yes'", "'yes.'") if name not in every]
    assert "test split alone" in every


def noise_variance() -> None:
    method = methods.fedavg().but(upload=(GaussianNoise(0.3),))
    norms = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)), nn.utils.spectral_norm(nn.Linear(4, 3))
    found = [refused(MethodError, norm, method=method).facts["name"] for norm in norms]
    assert found == ["0.running_var", "weight_u"]


def plain_crashes() -> None:
    with pytest.raises(MethodError):
        Phase(batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        adam(0.1, rates=[("bias", 0.0)])  # type: ignore[arg-type]
    assert simulate(made(Net), methods.fedavg(), TOY, epochs=0.01, engine="sequential").round == 1


def no_home() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "USERPROFILE"):
            patch.setenv(name, str(Path.cwd()))
        simulate(made(Net), methods.fedavg(), TOY, rounds=1, engine="sequential", out="~/run")
        assert Path("run", "run.json").exists()
        patch.setattr("os.path.expanduser", lambda path: path)  # as where nobody knows the user's home
        for reads in (load_model, lambda path, _: read_table(path, user="user")):
            with raises(ConfigError, path="~/run"):
                reads("~/run", "anna")
    with pytest.raises(RunError):
        simulate(made(Net), methods.fedavg(), TOY, rounds=1, engine="sequential", out="x" * 300)


def bad_advice() -> None:
    for client, label, place in (([None, "a"], [0, 1], 0), (["a", "a"], [0, None], 1)):
        with pytest.raises(DataError, match=f"Row {place}"):
            FederatedData.from_columns(client=client, columns={"x": np.zeros((2, 4)), "label": label})
    said = str(refused(MethodError, made(Heads)))
    loss = methods.terms.cross_entropy(task="aux")
    assert "cross_entropy(task='aux')" in said
    judged = toy(users=6, examples=40)
    judged.meta["tasks"] = {"aux": {"task": "multiclass", "label": "label"}}  # as the message says
    assert "meta['tasks'] = {'aux': {'task': 'multiclass', 'label': 'label'}}" in said
    run = simulate(made(Heads), methods.fedavg(local=Phase(loss=loss)), judged, rounds=1)
    assert run.evaluate("test")["loss/aux"] < 2
    toyed(made(Only), method=methods.fedavg(local=Phase(loss=loss)))


class Heads(Net):
    """Two outputs, of which nobody knows which is judged."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"aux": out, "main": out.flip(1)}


class Only(Net):
    """One output with a name."""

    def forward(self, x: Tensor) -> Any:
        return {"aux": super().forward(x)}


CASES: dict[str, Callable[[], None]] = {
    "F1 written unseen": written_unseen,
    "F2 default device": default_device,
    "F3 threads": threads,
    "F7 gradients of zero": gradients_of_zero,
    "F11 labels and ids": labels_spaces,
    "F12 noise on statistics": noise_variance,
    "F13 kwargs": kwargs_forward,
    "F13 attributes": attribute_names,
    "F14 layers": features_layer,
    "F15 graphs": graph_module,
    "F16 plain arguments": plain_crashes,
    "F17 no home": no_home,
    "F18 advice": bad_advice,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_a_case_is_right_or_refused_by_name(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CASES[case]()


class ZeroHead(Net):
    """A head that begins at zero: in the first step nothing beneath it moves."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.classifier.weight)


STEPS, REST = Phase(batch_size=8), Phase(batch_size=8, optimizer=sgd(0.1, rates={"features.*": 0.0}))


@pytest.mark.parametrize(
    ("module", "method"),
    [
        (ZeroHead, methods.fedavg(local=STEPS)),
        (ZeroHead, methods.fedper("classifier.*", local=STEPS)),
        (
            ZeroHead,
            methods.fedrep("features.*", local=STEPS),
        ),  # its first phase moves nothing, its second does
        (Zeroed, methods.fedper("classifier.*", local=Phase(batch_size=99))),
        (Zeroed, methods.fedper("classifier.*", local=REST)),
        (
            Zeroed,
            methods.fedper("classifier.*", local=STEPS).but(split=Split("classifier.*", frozen="features.*")),
        ),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_what_begins_at_zero_or_is_to_rest_is_right(module: type[Net], method: Any, engine: str) -> None:
    toyed(made(module), engine, method)


class Summed(Net):
    """Adds one number to every output, so that a vector's gradient is that number, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shift.sum().exp()


def test_an_expanded_gradient_is_clipped() -> None:
    method = methods.fedavg(local=Phase(clip_norm=0.01))
    found, wanted = (toyed(made(Summed), engine, method) for engine in ("sequential", "vectorised"))
    torch.testing.assert_close(found, wanted)
