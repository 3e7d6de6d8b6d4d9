"""``fedkeep export`` and ``load_model``: a client's model as files gives what the run's does."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedkeep as library
from fedkeep.core.errors import ConfigError, MethodError, RunError
from fedkeep.core.files import state_name
from fedkeep.engines.use import PersonalModel
from fedkeep.experiments.load import load_run
from fedkeep.experiments.onnx_files import write_onnx
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.experiments.run import Run
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.engines.vectorised.cohorts import TEXTS
from tests.engines.vectorised.test_suits import Packed
from tests.methods.parts import Parts
from tests.tiny import interrupt

TEXT = """
data = { reader = "many_user_text", users = 4, examples = 12, classes = 6 }
model = { kind = "document", user_dim = 4, embedding_dim = 6, hidden = 5, mlp = 7 }
method = { kind = "furl", private = "user" }
run = { rounds = 1, cohort = 2 }
"""


def examples(run: Run, client: str) -> dict[str, Tensor]:
    batch = run.data.batch(run.data.rows(run.data.index(client)))
    return {name: batch[name] for name in ("x", "text", "text_length") if name in batch}


@pytest.fixture
def trained(fedkeep: Command) -> Callable[..., Run]:
    """Trains ``toy.toml`` with settings, in the folder ``r``."""

    def train(*settings: str, config: str = "toy.toml") -> Run:
        words = [word for setting in settings for word in ("--set", setting)]
        succeeded(fedkeep("run", config, "--out", "r", *words))
        return load_run(Path("r"))

    return train


def test_a_clients_model_predicts_as_in_the_run(trained: Callable[..., Run], fedkeep: Command) -> None:
    run = trained()
    succeeded(fedkeep("export", "r", "--client", "user-3", "--out", "deep/m"))
    assert set(load_file(Path("deep/m/shared.safetensors"))) == set(run.server)
    own = load_file(Path("deep/m/clients") / state_name("user-3"))
    assert set(own) == {"user"}
    assert torch.equal(own["user"], run.kept("user-3").params["user"])
    columns = examples(run, "user-3")
    found = library.load_model("deep/m", "user-3")(**columns)
    weight, bias = (run.server[f"linear.{name}"] for name in ("weight", "bias"))
    torch.testing.assert_close(found, columns["x"].float() @ weight.T + bias + own["user"])
    with pytest.raises(RunError, match=r"deep/m holds no model of.*'user-4'.*1.*'user-3'"):
        library.load_model("deep/m", "user-4")


def test_a_client_is_the_same_however_its_id_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = library.FederatedData.from_columns(
        [7, 7, "e\u0301", "e\u0301"],
        {"input": torch.randn(4, 4).numpy(), "label": [0, 1, 2, 0]},
        split=["train"] * 4,
    )
    run = library.simulate(nn.Linear(4, 3), library.methods.fedrep("bias"), data, rounds=1, cohort=2)
    model = nn.Linear(4, 3)
    for given, kept in ((7, "7"), ("e\u0301", "\u00e9")):
        run.export(tmp_path / kept, [given])
        own = run.kept(kept).params["bias"]
        assert torch.equal(run.kept(given).params["bias"], own)
        assert torch.equal(run.parameters(given)["bias"], own)
        assert run.sent(given).params.keys() == {"weight"}
        for client in (given, kept):
            assert torch.equal(
                library.load_model(tmp_path / kept, client, model=model).state_dict()["bias"], own
            )


@pytest.mark.parametrize("kind", ["apfl", "ditto", "ifca"])
def test_methods_that_predict_in_their_own_way(
    kind: str, trained: Callable[..., Run], fedkeep: Command
) -> None:
    run = trained(f"method={{kind='{kind}'}}")
    assert fedkeep("export", "r", "--all", "--out", "m").exit_code == 0
    for name in map(str, run.data.ids):
        columns = examples(run, name)
        flat = {**run.sent(name).flat, **run.kept(name).flat}
        wanted = run.method.predict(run.net, flat, columns)
        assert torch.equal(library.load_model("m", name)(**columns), wanted)


def scaled(_: Any, values: Any, columns: Any) -> Any:
    """Predict by a weight of the model and a scale beside it."""
    return values["weight"] * values["server/my.scale"] * columns["x"]


@pytest.mark.parametrize("scale", [2.0, 2])
def test_what_is_beside_a_model_moves_with_it(scale: float) -> None:
    method = replace(library.methods.fedavg(), predict=scaled)
    model = PersonalModel(nn.Linear(1, 1), method, {"server/my.scale": torch.full((1,), scale)})
    x, names = torch.tensor([1.0, 3.0]), model.state_dict().keys()
    found = model(x=x)
    torch.testing.assert_close(model.double()(x=x.double()), found.double())
    assert model.to("meta")(x=x.double().to("meta")).is_meta
    assert model.state_dict().keys() == names == {"module.weight", "module.bias"}


def test_who_was_held_out_is_fitted_first(
    trained: Callable[..., Run], fedkeep: Command, refused: Callable[..., str]
) -> None:
    run = trained("run.hold_out=0.4")
    name = run.held_out[0]
    said = refused("export", "r", "--client", name, "--out", "m")
    assert f"{name!r} was held out" in said
    assert f"fedkeep personalize RUN --client {name}" in said
    assert not Path("m").exists()
    assert fedkeep("personalize", "r", "--client", name).exit_code == 0
    assert fedkeep("export", "r", "--client", name, "--out", "m").exit_code == 0
    own = adapt_clients(run, [name]).own(name)
    assert own["user"].abs().sum() > 0
    assert torch.equal(library.load_model("m", name).state_dict()["user"], own["user"])


def test_who_was_held_out_of_a_method_that_fits_nothing_has_the_shared_model(
    trained: Callable[..., Run], fedkeep: Command
) -> None:
    run = trained("run.hold_out=0.4", 'method={kind="fedavg"}')
    name = run.held_out[0]
    assert fedkeep("export", "r", "--client", name, "--out", "m").exit_code == 0
    written = library.load_model("m", name).state_dict()
    assert all(torch.equal(written[key], value) for key, value in run.server.items())


def test_copies_are_what_every_client_fitted(trained: Callable[..., Run], fedkeep: Command) -> None:
    run = trained('method={kind="fine_tuned"}')
    name = str(run.data.ids[0])
    assert fedkeep("export", "r", "--client", name, "--out", "m").exit_code == 0
    written, own = library.load_model("m", name).state_dict(), adapt_clients(run, [name]).own(name)
    for key, value in run.server.items():
        assert torch.equal(written[key], own[key])
        assert not torch.equal(written[key], value)


def test_raw_rows_are_encoded_as_the_data_were(
    trained: Callable[..., Run], fedkeep: Command, csv: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(csv("bo,1000.5,70,0", "bo,999,71,1")))
    assert fedkeep("run", "table.toml", "--out", "r", "--set", "preparation.standardise=true").exit_code == 0
    assert fedkeep("export", "r", "--all", "--out", "m").exit_code == 0
    run, encoding = load_run(Path("r"), data_folder=Path("data")), library.load_encoding("m")
    rows = [[i % 5 + 0.5, i * 7 % 3] for i in range(10)] + [[1000.5, 70], [999, 71]]
    client = run.data.index("bo")
    order = sorted(map(tuple, run.data.batch(run.data.rows(client))["x"].tolist()))
    batch = encoding.batch(x=rows)
    assert sorted(map(tuple, batch["x"].tolist())) == order
    assert batch["x"].abs().max() < 7  # on their scales
    assert encoding.meta["label_names"] == ["0", "1"]
    assert encoding.sizes == {"classes": 2, "features": 2}
    weight, bias = (run.server[f"linear.{name}"] for name in ("weight", "bias"))
    own = run.parameters("bo")["user"]
    torch.testing.assert_close(library.load_model("m", "bo")(**batch), batch["x"] @ weight.T + bias + own)


def test_texts_are_encoded_by_the_exported_vocabulary(trained: Callable[..., Run], fedkeep: Command) -> None:
    Path("data").mkdir()
    rows = [f"{user},{text},{label}" for user in "ab" for text, label in (("good day", 1), ("bad", 0)) * 4]
    Path("data/t.csv").write_text("\n".join(["user,text,label", *rows]) + "\n")
    Path("t.toml").write_text(
        'data = { reader = "table", path = "t.csv", tokens = "word" }\n'
        'model = { kind = "bag_of_words", user_dim = 2 }\nmethod = { kind = "furl" }\nrun = { rounds = 1, cohort = 2 }\n'
    )
    assert fedkeep("run", "t.toml", "--data", "data", "--out", "r").exit_code == 0
    run = load_run(Path("r"), data_folder=Path("data"))
    run.export("m")
    columns = library.load_encoding("m").batch(text=["good day", "day of nobody"])
    words = {word: run.data.meta["vocabulary"]["symbols"].index(word) + 2 for word in ("good", "day")}
    assert columns["text"].tolist() == [[words["good"], words["day"], 0], [words["day"], 1, 1]]
    assert library.load_model("m", "a")(**columns).shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["apfl", "ifca", "text"])
def test_onnx_gives_the_same_numbers(kind: str, trained: Callable[..., Run], fedkeep: Command) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    Path("text.toml").write_text(TEXT, encoding="utf-8")
    run = trained(config="text.toml") if kind == "text" else trained(f"method={{kind='{kind}'}}")
    name = str(run.data.ids[1])
    succeeded(fedkeep("export", "r", "--client", name, "--onnx", "--out", "m"))
    columns = examples(run, name)  # of another number and length than those that it was traced with
    session = onnxruntime.InferenceSession((Path("m/clients") / state_name(name)).with_suffix(".onnx"))
    (found,) = session.run(None, {n: v.numpy() for n, v in columns.items()})
    torch.testing.assert_close(
        torch.from_numpy(found), library.load_model("m", name)(**columns), rtol=0, atol=1e-5
    )


def worded(*texts: str) -> Run:
    """Train on a client's texts."""
    Path("t.csv").write_text(
        "\n".join(["user,text,label", *(f"a,{text},{n % 2}" for n, text in enumerate(texts))])
    )
    data = library.data.read_table("t.csv", tokens="word").split_per_user()
    model = library.models.BagOfWords(len(data.meta["vocabulary"]["symbols"]) + 2, 2)
    return library.simulate(model, library.methods.fedrep("*bias"), data, rounds=1, cohort=1)


@pytest.mark.slow
@pytest.mark.usefixtures("fedkeep")
def test_a_client_with_short_texts_has_an_onnx_file_for_texts_of_any_length() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for folder, run in (("one", worded(*"yznyznyzny")), ("none", worded("", "", *"yznyznyz"))):
        run.export(folder, ["a"], onnx=True)
        session = onnxruntime.InferenceSession(
            (Path(folder) / "clients" / state_name("a")).with_suffix(".onnx")
        )
        model = library.load_model(folder, "a", model=run.net.module)
        for shape in ((1, 1), (3, 4), (7, 2)):
            columns = {
                "text": torch.ones(shape, dtype=torch.int64),
                "text_length": torch.full(shape[:1], shape[1]),
            }
            (found,) = session.run(None, {i.name: columns[i.name].numpy() for i in session.get_inputs()})
            torch.testing.assert_close(torch.from_numpy(found), model(**columns), rtol=0, atol=1e-5)


class Says(nn.Linear):
    """A linear layer whose scores come as ``form`` says."""

    def __init__(self, form: str) -> None:
        super().__init__(4, 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        forms = {"tuple": (scores, x), "object": SimpleNamespace(logits=scores, x=x)}
        return forms.get(self.form, {self.form: scores, "b": scores + x[:, :3], "hidden": x})


def saying(form: str) -> Run:
    """Train a model whose scores come in a form; ``a`` is the first of two tasks."""
    data, both = library.data.toy(), library.methods.terms.cross_entropy()
    if form == "a":
        data.meta["tasks"] = {name: {"label": "label", "task": "multiclass", "classes": 3} for name in "ab"}
        both = library.methods.terms.cross_entropy(task="a") + library.methods.terms.cross_entropy(task="b")
    method = library.methods.fedrep("bias", local=library.Phase(loss=both))
    return library.simulate(Says(form), method, data, rounds=1, cohort=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tuple", "object", "logits", "a"])
def test_onnx_gives_what_is_judged(form: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    run = saying(form)
    run.export(tmp_path / "m", ["user-1"], onnx=True)
    session = onnxruntime.InferenceSession(
        (tmp_path / "m" / "clients" / state_name("user-1")).with_suffix(".onnx")
    )
    x, own = examples(run, "user-1")["x"].float(), run.parameters("user-1")
    scores = x @ own["weight"].T + own["bias"]
    names = [output.name for output in session.get_outputs()]
    assert names == (["a", "b"] if form == "a" else ["output"])
    for found, wanted in zip(session.run(None, {"x": x.numpy()}), (scores, scores + x[:, :3]), strict=False):
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("logits", "Says cannot be written as ONNX: no such type: x. Leave out --onnx."),
        (
            "scores",
            "Says cannot be written as ONNX: The model returns outputs for ['b', 'hidden', 'scores']; 'logits'",
        ),
    ],
)
def test_onnx_that_nothing_computes_is_refused(
    form: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise RuntimeError("no such type:\n  x.")

    run = saying("logits")
    run.net.module.form = form
    for name in ("onnxscript", "onnxruntime"):
        package = SimpleNamespace(__spec__=ModuleSpec(name, None), InferenceSession=cannot)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(torch.onnx, "export", lambda *_, **__: SimpleNamespace(save=Path.touch))
    with pytest.raises(MethodError, match=f"^{re.escape(message)}"):
        run.export(tmp_path / "m", ["user-1"], onnx=True)
    assert not (tmp_path / "m").exists()


@pytest.mark.filterwarnings("ignore:.*were never drawn:UserWarning")
def test_a_run_of_ones_own_module(tmp_path: Path) -> None:
    model = library.models.Linear(4, 3)
    run = library.simulate(model, library.methods.furl("user"), library.data.toy(), rounds=1, cohort=2)
    folder = tmp_path / "m"
    assert run.export(folder, ["user-1"]) == ["user-1"]
    with pytest.raises(ConfigError, match=r"give it, load_model\(..., model=MyModule\(\)\)\."):
        library.load_model(folder, "user-1")
    loaded = library.load_model(folder, "user-1", model=model)
    assert loaded is not model
    for name, value in run.parameters("user-1").items():
        assert torch.equal(loaded.state_dict()[name], value)
    with pytest.raises(ConfigError, match="The Linear that was given is"):
        library.load_model(folder, "user-1", model=nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="float32 3x4' in the run, 'float32 2x4' now"):
        library.load_model(folder, "user-1", model=library.models.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module; got <class .*Linear'>\."):
        library.load_model(folder, "user-1", model=library.models.Linear)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keeps no encoding: its models"):
        library.load_encoding(folder)
    with pytest.raises(RunError, match="no exported models"):
        library.load_encoding(tmp_path)
    (folder / "shared.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match="is damaged: its hash is not the committed one"):
        library.load_model(folder, "user-1", model=model)
    with pytest.raises(RunError, match="already exists; it is not overwritten"):
        run.export(folder)


def gated() -> nn.Module:
    torch.manual_seed(0)
    linear = library.models.Linear
    return library.models.MixtureOfExperts(linear(4, 3), linear(4, 3), library.models.ConfidenceGate())


LOCAL = library.Phase(batch_size=4)


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda: library.models.Linear(4, 3), library.methods.fine_tuned(local=LOCAL)),
        (gated, library.methods.mixture(local=LOCAL, local_epochs=2, mixture_epochs=2, early_stopping=None)),
        (lambda: Parts(4), library.methods.kteps(local=LOCAL)),
        (lambda: library.models.Linear(4, 3), library.methods.ditto(local=LOCAL)),
    ],
    ids=["fine_tuned", "mixture", "kteps", "ditto"],
)
def test_an_adapted_result_is_judged_written_and_predicts_with_the_same_numbers(
    make: Callable[[], nn.Module], method: library.Method, tmp_path: Path
) -> None:
    data = library.data.toy()
    run = library.simulate(make(), method, data, rounds=1, cohort=4)
    found = adapt_clients(run)
    assert found.export(tmp_path / "m") == list(data.ids)
    given = {"model": make(), "method": method}
    right = losses = count = 0.0
    for client in data.ids[:3]:
        rows = data.rows(data.index(client), "test")
        batch = {"x": data.batch(rows)["x"]}
        written, here = library.load_model(tmp_path / "m", client, **given), found.model(client)  # type: ignore[arg-type]
        label = data.batch(rows)["label"]
        with torch.no_grad():
            logits = written(**batch)
            assert torch.equal(logits, here(**batch))
        right += int((logits.argmax(1) == label).sum())
        losses += float(nn.functional.cross_entropy(logits, label, reduction="sum"))
        count += len(label)
    judged, before = (found.evaluate(clients=data.ids[:3], stage=s) for s in ("own", "before"))  # type: ignore[arg-type]
    assert judged["accuracy"] == right / count
    assert judged["loss"] == pytest.approx(losses / count, rel=1e-5)
    assert judged["loss"] != before["loss"]
    if method.name == "kteps":
        with pytest.raises(ConfigError, match="'kteps' predicts in a way of its own"):
            library.load_model(tmp_path / "m", data.ids[0], model=make())
        other = library.methods.kteps(copies=("encoder", "classifier"))
        with pytest.raises(ConfigError, match="predicts otherwise"):
            library.load_model(tmp_path / "m", data.ids[0], model=make(), method=other)


def test_values_that_were_never_trained_are_written_with_a_warning(tmp_path: Path) -> None:
    def run(rounds: int) -> Run:
        method, data = library.methods.furl("user"), library.data.toy(users=4)
        return library.simulate(library.models.Linear(4, 3), method, data, rounds=rounds, cohort=2)

    with pytest.warns(UserWarning, match="No round was trained"):
        run(0).export(tmp_path / "none")
    once = run(1)
    with pytest.warns(UserWarning, match="2 of 4 clients were never drawn"):
        once.export(tmp_path / "some")
    drawn = [c for c, was in zip(once.data.ids, once.private.seen(range(4)), strict=True) if was]
    once.export(tmp_path / "drawn", drawn)
    once.fit(list(once.data.ids))
    once.export(tmp_path / "all")


def test_what_cannot_be_exported_leaves_nothing(
    tmp_path: Path, trained: Callable[..., Run], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained()
    assert refused("export", "r", "--out", "m") == (
        "Error: Say whose models: --client ID, which may be repeated, or --all."
    )
    plain = library.simulate(
        library.models.Linear(4, 3), library.methods.furl("user"), library.data.toy(), rounds=1
    )

    monkeypatch.setattr("fedkeep.experiments.personalize.exported.sealed_bytes", interrupt)
    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        plain.export("m")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True])
def test_onnx_of_packed_sequences_is_refused_with_a_way_out_that_works(ours: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    write = partial(write_onnx, Packed(ours).eval(), TEXTS, 0, tmp_path / "m.onnx")
    if ours:
        write()
        return
    with pytest.raises(MethodError, match="^Packed cannot be written as.*ONNX.*pack_padded_sequence"):
        write()


class Long(torch.nn.Module):
    """Asks a tensor for its length, as many do."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.ours, self.place, self.head = ours, torch.nn.Parameter(torch.randn(1, 4)), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0] if self.ours else len(x)
        return self.head(x + self.place.expand(count, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ours", [False, True])
def test_onnx_of_a_tensors_length_is_refused_with_a_way_out_that_works(ours: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    data = library.FederatedData.from_columns(["a"] * 6, {"x": np.ones((6, 4), "f4"), "label": [0, 1] * 3})
    write = partial(write_onnx, Long(ours).eval(), data, 0, tmp_path / "m.onnx")
    if ours:
        write()
        return
    with pytest.raises(MethodError, match=r"^Long cannot be written as ONNX.*len\(\).*x\.shape\[0\]"):
        write()


def test_every_file_is_flushed_once_before_the_folder_has_its_name(
    trained: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flushed, done = trained(), list[int](), list[dict[str, int]]()
    flush, rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        flushed.append(os.fstat(handle).st_ino)
        flush(handle)

    def named(part: Path, out: Path) -> None:
        found = {str(path.relative_to(part)): path.stat().st_ino for path in [part, *part.rglob("*")]}
        done.append({name: flushed.count(number) for name, number in found.items()})
        rename(part, out)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", named)
    run.export("m", ["user-1", "user-2"])
    files = ["model.json", "shared.safetensors", *(f"clients/{state_name(f'user-{k}')}" for k in (1, 2))]
    assert done == [dict.fromkeys([".", "clients", *files], 1)]
    assert flushed[-1] == Path.cwd().stat().st_ino  # the name itself
