"""A device's clients and what their server has published: the simulation's models to the bit, at each hospital."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedkeep import adapters, load_adapter, load_model
from fedkeep.core.errors import ConfigError, DataError, RunError
from fedkeep.core.records import read_records
from fedkeep.core.run_files import read_info
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.predicting import predict_table
from fedkeep.flower import client_app
from fedkeep.flower.client_app import serve
from fedkeep.flower.grid import GridTransport
from fedkeep.flower.keys import make_keys
from fedkeep.flower.project import new_project
from fedkeep.flower.publishing import publish
from fedkeep.flower.served import federation_of
from fedkeep.flower.signed import sign_project
from fedkeep.remote import fingerprint
from fedkeep.remote.attendance import attendance_of
from fedkeep.remote.device_file import DeviceFile, LogLine
from fedkeep.remote.roll_back import roll_back
from fedkeep.remote.served_run import serve_run
from fedkeep.report.page import write_report
from fedkeep.report.wording import number as in_words
from tests.commands import call
from tests.flower.loopback import Loopback, context
from tests.refusals import raises
from tests.tiny import same_bits

SITES = ("north", "south", "west")
CONFIG = """
name = "visits"
[preparation]
standardise = true
[model]
{model}
[method]
{method}
batch_size = 8
[run]
rounds = {rounds}
cohort = 3
accelerate = false
[rounds]
clients = 3
"""
LINEAR = 'kind = "linear"'
ANY_LENGTH = (
    'kind = "furl"\noptimizer = { learning_rate = 0.1 }'  # a usual rate may fall with the run's length
)
TWO_LAYERS = 'kind = "tests.flower.test_published:TwoLayers"'
MIXTURE = """kind = "mixture_of_experts"
global_expert = { kind = "linear" }
local_expert = { kind = "linear" }
gate = { kind = "confidence_gate" }"""


class TwoLayers(nn.Module):
    """A stranger's module, with a head that methods name."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, 5), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.head(torch.relu(self.body(x)))
        return out


def rows(site: int, start: int = 0, count: int = 30) -> list[tuple[float, float, str]]:
    draws = np.random.default_rng(site + 10 * start)
    found = []
    for age, dose in draws.normal((50, 2), (9, 1), (count, 2)).round(2).tolist():
        state = age + (site - 1) * 9 * dose + draws.normal(0, 3)
        found.append((age, dose, "ill" if state > 55 else "watched" if state > 46 else "well"))
    return found


class Hospitals:
    """Three hospitals and an owner: keys, signed project, node.toml and a table each; the link is in this process."""

    def __init__(self, folder: Path, method: str, model: str = LINEAR, rounds: int = 3) -> None:
        self.folder, self.run, self.made, self.rounds = folder, folder / "run", 0, rounds
        self.text = CONFIG.format(method=method, model=model, rounds=rounds)
        make_keys(folder / "keys", hosts=[], nodes=[])
        new_project(folder / "project", self.text, "visits", out=self.run)
        sign_project(folder / "project", folder / "keys" / "signer.key")
        everyone = ["user,age,dose,label"]
        for number, name in enumerate(SITES):
            everyone += self.site(name, number)
        (folder / "all.csv").write_text("\n".join(everyone))

    def site(self, name: str, number: int) -> list[str]:
        home = self.folder / name
        home.mkdir()
        lines = [f"{name},{age},{dose},{label}" for age, dose, label in rows(number)]
        (home / "mine.csv").write_text("\n".join(["user,age,dose,label", *lines]))
        new = [f"{name},{age},{dose}" for age, dose, _ in rows(number, 1)]
        (home / "new.csv").write_text("\n".join(["user,age,dose", *new]))
        (home / "node.toml").write_text(f"""
[data]
reader = "table"
path = "mine.csv"
features = ["age", "dose"]
[device]
owner = "{name}"
folder = "states"
[link]
address = "localhost:1"
certificate = "ca.pem"
key = "{name}.key"
trusted = ["../keys/signer.pub"]
""")
        return lines

    def train(self, sites: tuple[str, ...] = SITES, only: Any = "", keep_rounds: int = 0) -> None:
        client_app._configured.cache_clear()
        contexts = [
            context(7 + k, **{client_app.NODE_CONFIG: str(self.folder / name / "node.toml")})
            for k, name in enumerate(sites)
        ]
        made = replace(federation_of(self.text), clients=len(sites))
        grid = GridTransport(Loopback(serve, contexts))
        serve_run(made, grid, self.run, progress=False, poll=0.01, only=only, keep_rounds=keep_rounds)

    def go_on(self, rounds: int) -> None:
        self.text = self.text.replace(f"rounds = {self.rounds}\n", f"rounds = {rounds}\n")
        self.train()

    def publish(self, *clients: str, last: bool = False) -> Path:
        self.made += 1
        out = self.folder / f"{self.made}.published"
        publish(
            self.run,
            out,
            project=self.folder / "project",
            key=self.folder / "keys" / "publisher.key",
            clients=clients,
            last=last,
        )
        return out

    def simulated(self) -> Any:
        data = f'data = {{ reader = "table", path = "{self.folder}/all.csv", features = ["age", "dose"] }}\n'
        text = data + self.text.replace("[rounds]\nclients = 3\n", "")
        return run_config(
            parse_config(text, "", {"run.engine": "sequential"}), out=self.folder / "simulation"
        )


def device(folder: Path, verb: str, *words: object) -> Any:
    given = ["device", verb, str(folder / "node.toml"), *map(str, words)]
    return call(*given)


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("method", "model", "adapts"),
    [
        ('kind = "furl"', LINEAR, False),
        ('kind = "mixture"\nlocal_epochs = 2\nmixture_epochs = 2', MIXTURE, True),
        slow('kind = "fine_tuned"', LINEAR, True),
        slow('kind = "fedbabu"\nhead = "head"', TWO_LAYERS, True),
        slow('kind = "apfl"', LINEAR, False),
        slow('kind = "fedpac"\nhead = "head"', TWO_LAYERS, False),
    ],
    ids=["furl", "mixture", "fine_tuned", "fedbabu", "apfl", "fedpac"],
)
def test_at_each_hospital_the_models_are_those_of_the_simulation_to_the_bit(
    method: str, model: str, adapts: bool, tmp_path: Path
) -> None:
    hospitals = Hospitals(tmp_path, method, model, rounds=6)
    hospitals.train()
    run = hospitals.simulated()
    assert 0 < run.round < run.last.round
    run.export(tmp_path / "models")
    for name in SITES:
        home, apart = tmp_path / name, run.method.server.send is not None
        published = hospitals.publish(*[name] * apart)
        if adapts:
            early = device(home, "export", "--out", home / "early", "--published", published)
            assert early.exit_code == 2, early.output
            assert "fedkeep device adapt" in early.stderr
            assert not (home / "early").exists()
            done = device(home, "adapt")
            assert done.exit_code == 0, done.output
        said = device(
            home,
            "predict",
            "--data",
            home / "new.csv",
            "--out",
            home / "predicted.csv",
            "--published",
            published,
        )
        assert said.exit_code == 0, said.output
        exported = device(home, "export", "--out", home / "models")
        assert exported.exit_code == 0, exported.output
        wanted = predict_table(tmp_path / "models", home / "new.csv")
        assert predict_table(home / "models", home / "new.csv") == wanted
        assert [line.split(",")[:2] for line in (home / "predicted.csv").read_text().splitlines()[1:]] == [
            [one.client, one.tasks[0].value] for one in wanted
        ]
        own, other = (
            load_model(folder, name).state_dict() for folder in (home / "models", tmp_path / "models")
        )
        assert [n for n in other if not torch.equal(own[n], other[n])] == []
        found = device(home, "evaluate")
        assert found.exit_code == 0, found.output
        assert f"Round {run.round} of" in found.output
        assert found.stderr == ""


def test_round_last_gives_the_other_and_a_copy_of_before_says_what_it_lacks(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, 'kind = "furl"', rounds=6)
    hospitals.train()
    run, home = hospitals.simulated(), tmp_path / "north"
    best, last = hospitals.publish(), hospitals.publish(last=True)
    for file, one in ((best, run), (last, run.last), (best, run)):
        out = tmp_path / f"{file.stem}-{one.round}"
        assert device(home, "export", "--out", home / out.name, "--published", file).exit_code == 0
        one.export(tmp_path / "one", clients=["north"])
        own, other = (
            load_model(place, "north").state_dict() for place in (home / out.name, tmp_path / "one")
        )
        assert [n for n in other if not torch.equal(own[n], other[n])] == []
        for place in (home / out.name, tmp_path / "one"):
            shutil.rmtree(place)
    (path,) = (home / "states").glob("*.db")
    file = DeviceFile(path, "north")
    word = file.named("north")["best"].named
    with file.writing():
        file.drop([v.number for v in file.versions("north") if v.attempt == word.attempt])
    file.close()
    found = device(home, "evaluate")
    assert found.exit_code == 0, found.output
    assert (f"version {word.version}" in found.stderr, f"round {run.last.round}" in found.stderr) == (
        True,
        True,
    )


def adapted(home: Path) -> tuple[Any, Any]:
    """Return what a hospital's client has adapted to, and the row that says from what."""
    (path,) = (home / "states").glob("*.db")
    file = DeviceFile(path, home.name)
    row = file.adapted()[home.name]
    values = file.adapted_values(row)
    file.close()
    return values, row


def test_offline_a_device_adapts_to_the_bits_of_the_servers_order_and_may_do_both(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, 'kind = "fine_tuned"')
    hospitals.train()
    published, home = hospitals.publish(), tmp_path / "north"
    assert device(home, "adapt", "--published", published).exit_code == 0
    alone, _ = adapted(home)
    hospitals.train(only="adapt")
    ordered, row = adapted(home)
    assert row.attempt > 0
    assert same_bits(alone, ordered)
    assert device(home, "adapt").exit_code == 0
    assert adapted(home)[1] == row


def test_a_hospital_that_joins_after_training_adapts_and_predicts(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, 'kind = "furl"')
    run = hospitals.simulated()
    hospitals.train()
    published, home = hospitals.publish(), tmp_path / "east"
    hospitals.site("east", 1)
    refused = device(home, "predict", "--data", home / "new.csv", "--published", published)
    assert refused.exit_code == 2
    assert "no round has trained it" in refused.stderr
    shared = device(home, "predict", "--data", home / "new.csv", "--published", published, "--shared")
    assert shared.exit_code == 0, shared.output
    assert device(home, "adapt", "--published", published).exit_code == 0
    said = device(home, "predict", "--data", home / "new.csv", "--out", home / "predicted.csv")
    assert said.exit_code == 0, said.output
    run.export(tmp_path / "models")
    shared_values = load_model(tmp_path / "models", "north").state_dict()
    device(home, "export", "--out", home / "models")
    own = load_model(home / "models", "east").state_dict()
    assert [n for n in own if not torch.equal(own[n], shared_values[n])] == ["user"]
    assert own["user"].any()
    folder = home / "models" / "clients"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model"),
    [
        ('kind = "fedper"\nhead = "head"', TWO_LAYERS),
        ('kind = "mixture"\nlocal_epochs = 1\nmixture_epochs = 1', MIXTURE),
    ],
)
def test_a_program_without_torch_predicts_by_an_onnx_file_as_the_device_does(
    method: str, model: str, tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    pytest.importorskip("onnxscript")
    hospitals = Hospitals(tmp_path, method, model)
    hospitals.train()
    home, published = tmp_path / "south", hospitals.publish()
    if "mixture" in method:
        assert device(home, "adapt", "--published", published).exit_code == 0
    done = device(home, "export", "--onnx", "--out", home / "models", "--published", published)
    assert done.exit_code == 0, done.output
    (path,) = (home / "models" / "clients").glob("*.onnx")
    columns = json.loads(json.loads((home / "models" / "model.json").read_text())["encoding"])["columns"]
    names, features = columns["label"]["names"], columns["x"]
    lines = [line.split(",")[1:] for line in (home / "new.csv").read_text().splitlines()]
    assert lines[0] == features["names"]
    x = ((np.array(lines[1:], np.float64) - features["means"]) / features["scales"]).astype(np.float32)
    told = device(home, "predict", "--data", home / "new.csv", "--json")
    rows_told = [json.loads(line) for line in told.stdout.splitlines()]
    wanted = [[row["probabilities"][name] for name in names] for row in rows_told]
    for by in (runtime.InferenceSession(str(path)), evaluator(str(path))):
        (logits,) = by.run(None, {"x": x})
        found = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
        assert [names[k] for k in logits.argmax(1)] == [row["prediction"] for row in rows_told]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Hospitals:
    """Three hospitals after four rounds, with what was published after the second and the fourth."""
    made = Hospitals(tmp_path_factory.mktemp("trained"), ANY_LENGTH, rounds=2)
    made.train()
    made.publish()
    made.go_on(4)
    made.publish()
    return made


def refusal(home: Path, published: Path) -> str:
    found = device(home, "evaluate", "--published", published)
    assert found.exit_code == 2, found.output
    return " ".join(found.stderr.split())


def test_an_older_version_is_refused_before_and_after_a_newer_one_was_used(trained: Hospitals) -> None:
    home = trained.folder / "north"
    assert "of 2 rounds" in refusal(home, trained.folder / "1.published")
    assert device(home, "evaluate", "--published", trained.folder / "2.published").exit_code == 0
    assert "older" in refusal(home, trained.folder / "1.published")
    assert device(home, "evaluate").exit_code == 0


def test_a_device_follows_what_a_server_publishes_that_was_rolled_back(tmp_path: Path) -> None:
    """Before it has heard of that by a message, and after; what it had adapted to before is no more."""
    hospitals, home = Hospitals(tmp_path, 'kind = "apfl"', rounds=4), tmp_path / "north"
    hospitals.train(keep_rounds=4)
    newest = hospitals.publish(last=True)
    assert device(home, "evaluate", "--published", newest).exit_code == 0
    roll_back(hospitals.run, 3)
    found = device(home, "evaluate", "--published", hospitals.publish(last=True))
    assert (found.exit_code, found.stderr) == (0, "")
    assert "older" in refusal(home, newest)
    hospitals.train(keep_rounds=4)
    assert device(home, "evaluate", "--published", hospitals.publish(last=True)).exit_code == 0


def test_what_was_adapted_to_a_round_that_is_taken_back_is_adapted_again(tmp_path: Path) -> None:
    hospitals, home = Hospitals(tmp_path, 'kind = "fine_tuned"', rounds=2), tmp_path / "north"
    hospitals.train(keep_rounds=2)
    assert device(home, "adapt", "--published", hospitals.publish(last=True)).exit_code == 0
    assert device(home, "evaluate").exit_code == 0
    roll_back(hospitals.run, 1)
    hospitals.train()
    again = hospitals.publish(last=True)
    assert "adapting after the rounds" in refusal(home, again)
    for _ in range(2):
        assert device(home, "adapt", "--published", again).exit_code == 0
        assert device(home, "evaluate").exit_code == 0


class WithAdapter(nn.Module):
    """A stranger's module whose body has an adapter."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.inner = adapters(TwoLayers(features, classes), rank=2, on=["body"])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.inner(x)
        return out


def test_a_device_writes_its_clients_adapters_for_peft(tmp_path: Path) -> None:
    model = 'kind = "tests.flower.test_published:WithAdapter"'
    hospitals = Hospitals(tmp_path, 'kind = "fedper"\nprivate = "*.lora_*"', model, rounds=1)
    hospitals.train()
    home = tmp_path / "north"
    done = device(home, "export", "--out", home / "models", "--peft", "--published", hospitals.publish())
    assert done.exit_code == 0, done.output
    own = load_model(home / "models", "north")
    folder = next((home / "models" / "clients").glob("*.peft"))
    base = WithAdapter(2, 3)
    base.inner = TwoLayers(2, 3)  # the adapter comes from the folder
    again = load_adapter(base, folder).state_dict()
    lora = [name for name in again if ".lora_" in name]
    assert len(lora) == 2
    assert [n for n in lora if not torch.equal(again[n], own.state_dict()[n])] == []
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_device_predicts_the_same_after_an_upgrade(
    trained: Hospitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, out = trained.folder / "west", [tmp_path / name for name in ("before.csv", "after.csv")]
    given = ("--data", home / "new.csv", "--published", trained.folder / "2.published", "--out")
    assert device(home, "predict", *given, out[0]).exit_code == 0
    monkeypatch.setattr(fingerprint, "code", lambda: "9.9 abc")
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    assert device(home, "predict", *given, out[1]).exit_code == 0
    assert out[0].read_bytes() == out[1].read_bytes()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("fedper", ""),
        ("fine_tuned", "each device runs fedkeep device adapt"),
        ("pfedhn", "fedkeep flower publish --client"),
    ],
)
def test_the_owner_is_told_before_training_what_comes_after_it(kind: str, said: str, tmp_path: Path) -> None:
    head = {"fedper": '\nprivate = "linear.bias"'}.get(kind, "")
    text = CONFIG.format(method=f'kind = "{kind}"{head}', model=LINEAR, rounds=1)
    (tmp_path / "visits.toml").write_text(text)
    done = call("flower", "init", str(tmp_path / "visits"), "--config", str(tmp_path / "visits.toml"))
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert said in words
    assert ("after the rounds" in words or "--client" in words) == bool(said)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["user,age", "north,51"], "dose"),
        (["user,age,dose", "north,51,much"], "line 2"),
        (["user,age,dose"], "holds no example"),
    ],
    ids=["a column is missing", "a word for a number", "no rows"],
)
def test_what_is_wrong_with_new_rows_is_one_line_and_nothing_is_written(
    rows: list[str], words: str, trained: Hospitals, tmp_path: Path
) -> None:
    new, out, home = tmp_path / "new.csv", tmp_path / "predicted.csv", trained.folder / "north"
    new.write_text("\n".join(rows) + "\n")
    said = device(home, "predict", "--data", new, "--out", out, "--published", trained.folder / "2.published")
    assert said.exit_code == 2, said.output
    assert "Traceback" not in said.output
    assert words in " ".join(said.stderr.split())
    assert list(tmp_path.iterdir()) == [new]


def changed(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Write what was published with header or values changed, and the signature as it was."""
    with safe_open(str(path), framework="pt") as file:
        about = file.metadata()
    header, tensors = json.loads(about["published"]), load_file(path)
    change(header, tensors)
    save_file(tensors, out, metadata={**about, "published": json.dumps(header)})
    return out


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("round", "has not signed it"),
        ("run", "has not signed it"),
        ("value", "has not signed it"),
        ("project", "not those that were signed"),
        ("stranger", "no key that it trusts has signed"),
        ("garbage", "nothing that a run published"),
        ("missing", "There is no file"),
    ],
)
def test_what_was_changed_or_is_a_strangers_is_refused(
    what: str, said: str, trained: Hospitals, tmp_path: Path
) -> None:
    true, out = trained.folder / "2.published", tmp_path / "x.published"
    if what == "garbage":
        out.write_bytes(true.read_bytes()[:300])
    elif what == "stranger":
        make_keys(tmp_path / "keys", hosts=[], nodes=[])
        new_project(tmp_path / "project", trained.text, "visits", out=tmp_path / "run")
        sign_project(tmp_path / "project", tmp_path / "keys" / "signer.key")
        publish(trained.run, out, project=tmp_path / "project", key=tmp_path / "keys" / "publisher.key")
    elif what != "missing":

        def change(header: dict[str, Any], tensors: dict[str, Any]) -> None:
            if what == "value":
                tensors[next(iter(tensors))] += 1
            elif what == "project":
                header["project"]["contents"]["config.toml"] += "\n"
            else:
                header[what] = {"round": 9, "run": "another"}[what]

        changed(true, out, change)
    assert said in refusal(trained.folder / "south", out)


def test_of_two_federations_in_one_folder_the_run_is_named_and_no_file_passes_for_the_others(
    trained: Hospitals, tmp_path: Path
) -> None:
    for part in ("keys", "west"):
        shutil.copytree(trained.folder / part, tmp_path / part, ignore=shutil.ignore_patterns("*.lock"))
    home, published = tmp_path / "west", trained.folder / "2.published"
    run = read_info(trained.run)["run"]
    assert device(home, "evaluate", "--published", published).exit_code == 0
    (home / "states" / "another.db").touch()
    assert device(home, "evaluate").exit_code == 0  # of the other nothing was published yet
    (home / "states" / "another.published").touch()
    for words, said in (
        ([], "has what was published of 2 runs: "),
        ([], f" {run} (given 2"),
        ([], " another (given 2"),
        (["--run", "third"], "has nothing yet that a server of the run third published."),
        (["--published", published, "--run", "another"], f"is of the run {run}, and not of another."),
    ):
        found = device(home, "evaluate", *words)
        assert found.exit_code == 2, found.output
        assert said in " ".join(found.stderr.split())
    assert device(home, "evaluate", "--run", run).exit_code == 0


def test_the_owner_is_told_what_cannot_be_published(trained: Hospitals, tmp_path: Path) -> None:
    project, key = trained.folder / "project", trained.folder / "keys" / "publisher.key"
    with pytest.raises(ConfigError, match="names another key"):
        publish(trained.run, tmp_path / "x", project=project, key=key.with_name("signer.key"))
    with pytest.raises(ConfigError, match="sends all clients the same"):
        publish(trained.run, tmp_path / "x", project=project, key=key, clients=["north"])
    with pytest.raises(RunError, match="is a federation's run:"):
        load_run(trained.run)
    with pytest.raises(RunError, match="There is no run in"):
        publish(tmp_path, tmp_path / "x", project=project, key=key)
    new_project(tmp_path / "other", trained.text.replace("furl", "fedavg"), "visits", out=tmp_path / "run")
    sign_project(tmp_path / "other", key.with_name("signer.key"))
    with pytest.raises(RunError, match="not in the signed project"):
        publish(trained.run, tmp_path / "x", project=tmp_path / "other", key=key)
    assert not (tmp_path / "x").exists()


def test_whose_labels_are_no_classes_is_said_before_the_first_round(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, 'kind = "fedavg"')
    for site, labels in (("north", "01"), ("south", ("0.5", "1.25")), ("west", "01")):
        table = tmp_path / site / "mine.csv"
        head, *lines = table.read_text().splitlines()
        told = [f"{line.rpartition(',')[0]},{labels[n % 2]}" for n, line in enumerate(lines)]
        table.write_text("\n".join([head, *told]))
    with raises(DataError, place="Labels of node '8'", label="0.5"):  # south, see ``Hospitals.train``
        hospitals.train()
    assert not hospitals.run.exists()


def test_who_shows_whose_key_a_client_belongs_to_and_its_rounds(trained: Hospitals) -> None:
    keys = {"north": 7, "south": 8, "west": 9}
    assert attendance_of(trained.run).taken == dict.fromkeys(keys, 4)
    assert attendance_of(trained.run).lines() == []
    found = call("flower", "who", trained.run)
    assert found.exit_code == 0, found.output
    for name in keys:
        assert re.search(rf"{name} +key [0-9a-f]{{8}} +\d+ +4 +4\n", found.stdout), found.stdout


def test_a_run_is_watched_in_the_terminal_and_on_a_page(trained: Hospitals, tmp_path: Path) -> None:
    words = ["flower", "watch", str(trained.run), "--once", "--page", str(tmp_path)]
    found = call(*words)
    assert found.exit_code == 0, found.output
    assert "4 of 4 rounds are finished" in found.stdout
    assert re.search(r"Round 4: .*loss on train \d.* on valid \d.* on test \d", found.stdout), found.stdout
    assert re.search(r"north +key [0-9a-f]{8} +\d+ +4 +4 +here", found.stdout), found.stdout
    assert re.search(r"\d k?B have come from clients", found.stdout)
    page = (tmp_path / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page
    live = write_report([trained.run], tmp_path, refresh=5).read_text()
    assert live.replace('<meta http-equiv="refresh" content="5">\n', "") == page


def test_a_device_shows_its_terms_and_all_that_it_was_asked(trained: Hospitals) -> None:
    node = trained.folder / "north" / "node.toml"
    told = call("device", "log", node)
    assert told.exit_code == 0, told.output
    lines = told.stdout.splitlines()
    assert sum("1 client to train" in line for line in lines) == 4
    assert sum("1 update" in line for line in lines) == 4
    assert any(re.search(r"judged on test and valid.*results over \d+ examples", line) for line in lines)
    when = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  run [0-9a-f]{8}, (after )?round [1-4]: ")
    assert all(when.match(line) for line in lines)
    terms = call("device", "terms", node)
    assert terms.exit_code == 0, terms.output
    assert re.search(r"north +4 of any", terms.stdout), terms.stdout
    assert re.search(r"\[model\]\n +kind = ", terms.stdout), terms.stdout
    assert "no [privacy]" in terms.stdout
    assert "rounds" not in terms.stdout


def test_at_its_device_each_hospital_sees_how_its_models_do(trained: Hospitals) -> None:
    sums: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for site in SITES:
        (path,) = (trained.folder / site / "states").glob("*.db")
        with closing(DeviceFile(path, site)) as file:
            lines = file.log()
        for line in lines:
            for one in line.scores:
                if one.model in ("", "own"):
                    after = line.round + (one.split == "train")
                    sums.setdefault((after, one.split), []).append((one.value, one.of))
        found = device(trained.folder / site, "watch", "--once")
        assert found.exit_code == 0, found.output
        assert f"{len(lines)} messages were served" in found.stdout
        assert f"1 update and results over {line_of(lines, 3)} examples" in found.stdout
        mine = {
            (line.round + (one.split == "train"), one.split): in_words(one.value, one.metric)
            for line in lines
            for one in line.scores
        }
        wanted = [(str(k), mine[k, "train"], mine[k, "test"]) for k in range(1, 5)]
        assert re.findall(r"^([1-4]) +(\d\S+) .*?(\d+\.\d %)\s*$", found.stdout, re.MULTILINE) == wanted
    records = {
        (r.round, r.split): r.value
        for r in read_records(trained.run / "records.jsonl")
        if r.client is None and r.metric == ("loss" if r.split == "train" else "accuracy")
    }
    means = {at: sum(v * n for v, n in all) / sum(n for _, n in all) for at, all in sums.items()}
    assert means.keys() >= {(k, split) for k in range(1, 5) for split in ("train", "valid", "test")}
    assert means == pytest.approx({at: records[at] for at in means})


def line_of(lines: list[LogLine], round: int) -> int:
    """Return of how many examples results left with an update in a round."""
    (found,) = (line.examples for line in lines if line.round == round and line.uploads)
    assert found
    return found


def test_a_hospital_that_misses_rounds_is_named_at_the_end_and_on_the_page(tmp_path: Path) -> None:
    hospitals = Hospitals(tmp_path, ANY_LENGTH, rounds=2)
    hospitals.train()
    broken = tmp_path / "south" / "mine.csv"
    lines = broken.read_text().splitlines()
    broken.write_text("\n".join([lines[0].replace("dose", "dosis"), *lines[1:]]))
    hospitals.text = hospitals.text.replace("clients = 3\n", "clients = 3\ndeadline = 1\n")
    hospitals.go_on(4)
    found = attendance_of(hospitals.run)
    assert found.missed == {"south": (2, 4)}
    most, last = found.judged["test"]
    assert 0 < last < most
    said, *_, fewer = found.lines()
    assert said == "south took part in 2 of 4 rounds."
    assert (str(last) in fewer, str(most) in fewer) == (True, True)
    assert read_info(hospitals.run)["attendance"] == found.lines()
    page = write_report([hospitals.run], tmp_path / "page").read_text()
    assert said in page


def test_by_the_command_the_owner_publishes_beside_the_run(trained: Hospitals) -> None:
    found = call("flower", "publish", trained.run)
    assert found.exit_code == 0, found.output
    assert (
        device(trained.folder / "west", "evaluate", "--published", trained.folder / "run.published").exit_code
        == 0
    )
