"""One line keeps parameters of any Flower app on its nodes: tried on the apps that two of Flower's own templates make."""

from __future__ import annotations

import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch import nn

from fedkeep.core.errors import ConfigError, StoreError, UploadError
from fedkeep.flower import keep, own_values
from fedkeep.flower.keep_mod import Own
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import FlowerLink, free_port
from fedkeep.flower.processes import program
from tests.flower.loopback import Loopback, context
from tests.flower.test_transcripts import environment

NODES = 3
AS_IT_WAS = "app = ClientApp()"


@dataclass(frozen=True)
class Template:
    """An app as Flower's template makes it, its data and downloads replaced.

    Attributes:
        folder: where it is.
        package: of its code.
        kept: what its line keeps; where an app's rate is as small as Hugging Face's, more than the head.
        rounds, settings: of the run.
        accuracy: the metric's name.
        model: writes the model that the app would download, and returns the settings that name it.
    """

    folder: str
    package: str
    kept: tuple[str, ...]
    rounds: int
    settings: Mapping[str, Any]
    accuracy: str
    model: Callable[[Path], Mapping[str, Any]] = lambda folder: {}

    @property
    def here(self) -> Path:
        return Path(__file__).parent / self.folder

    def line(self, folder: object) -> str:
        kept = f"keep(*{self.kept!r}, folder={str(folder)!r})"
        return f"from fedkeep.flower import keep; app = ClientApp(mods=[{kept}])"


def bert(folder: Path) -> Mapping[str, Any]:
    """Write a small BERT of fresh values: larger ones than usual, as a few steps must do."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(
        vocab_size=32, max_position_embeddings=16, initializer_range=0.1, **sizes
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "bert")
    return {"model-name": str(folder / "bert")}


PYTORCH = Template("template", "quickstart", ("fc3.*",), 4, {"lr": 0.003, "local-epochs": 4}, "eval_acc")
HUGGING_FACE = Template(
    "template_huggingface",
    "hugging",
    ("bert.encoder.*", "bert.pooler.*", "classifier.*"),
    6,
    {"local-steps": 40, "num-labels": 2},
    "val_accuracy",
    bert,
)
TEMPLATES = pytest.mark.parametrize("app", [PYTORCH, HUGGING_FACE], ids=["PyTorch", "Hugging Face"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)


@pytest.fixture(autouse=True)
def _task():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


def step(message, _context):
    """Answer as an app does: every value that it was given plus one."""
    arrays = message.content["arrays"].to_torch_state_dict()
    record = ArrayRecord({name: value + 1 for name, value in arrays.items()})
    return Message(
        RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
    )


def echo(message, _context):
    """Answer an evaluation with what it was given."""
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


def order(arrays, round=1, kind="train", node=7):
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"server-round": round})})
    return Message(content, node, kind)


def ask(mod, message, app=step, node=7, **config):
    return mod(message, context(node, **config), app)


def arrays_of(reply):
    return reply.content["arrays"].to_torch_state_dict()


@pytest.fixture
def sent():
    torch.manual_seed(0)
    return Net().state_dict()


def test_what_was_sent_comes_back_and_the_rest_is_trained(tmp_path, sent):
    mod = keep("head.*", folder=tmp_path / "kept")
    for round in (1, 2):
        reply = arrays_of(ask(mod, order(sent, round)))
        assert list(reply) == list(sent)
        assert torch.equal(reply["head.weight"], sent["head.weight"])
        assert torch.equal(reply["base.weight"], sent["base.weight"] + 1)
    assert torch.equal(own_values(tmp_path / "kept")["head.weight"], sent["head.weight"] + 1 + 1)


def test_own_values_are_what_is_evaluated_and_they_do_not_leave(tmp_path, sent):
    mod, seen = keep("head.*", folder=tmp_path), []

    def evaluate(message, context):
        seen.append(arrays_of(message))
        return echo(message, context)

    before = ask(mod, order(sent, kind="evaluate"), evaluate)
    ask(mod, order(sent))
    after = ask(mod, order(sent, kind="evaluate"), evaluate)
    assert torch.equal(seen[0]["head.bias"], sent["head.bias"])
    assert torch.equal(seen[1]["head.bias"], sent["head.bias"] + 1)
    for reply in (before, after):
        assert torch.equal(arrays_of(reply)["head.bias"], sent["head.bias"])


def test_a_round_that_comes_again_counts_once(tmp_path, sent):
    mod = keep("head.*", folder=tmp_path)
    for round in (1, 2, 2, 2):
        ask(mod, order(sent, round))
    assert torch.allclose(own_values(tmp_path)["head.bias"], sent["head.bias"] + 2)


def test_nodes_with_one_folder_are_told_apart_by_partition_or_refused(tmp_path, sent):
    mod = keep("head.*", folder=tmp_path)
    for partition in (0, 1):
        ask(mod, order(sent), **{"partition-id": partition})
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"0.safetensors", "1.safetensors"}
    ask(mod, order(sent))
    with pytest.raises(StoreError, match=r"node\.safetensors.*partition-id"):
        ask(mod, order(sent), node=8)


def test_files_are_of_their_owner_alone(tmp_path, sent):
    ask(keep("head.*", folder=tmp_path / "kept"), order(sent))
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()} == {0o600}


def test_layers_are_named_by_their_class(tmp_path, sent):
    ask(keep(nn.BatchNorm1d, folder=tmp_path, model=Net()), order(sent))
    assert set(own_values(tmp_path)) == {name for name in sent if name.startswith("norm.")}
    assert own_values(tmp_path)["norm.num_batches_tracked"] == 1


def test_running_statistics_are_named_as_any_buffer(tmp_path, sent):
    ask(keep("*.running_*", folder=tmp_path), order(sent))
    assert set(own_values(tmp_path)) == {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize(
    ("patterns", "model", "said"),
    [
        ((), None, "needs a pattern"),
        (("haed.*",), Net(), "'haed.*'"),
        ((nn.BatchNorm1d,), None, "model="),
        ((nn.BatchNorm2d,), Net(), "BatchNorm2d"),
    ],
)
def test_a_wrong_call_is_told_at_once(tmp_path, patterns, model, said):
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        keep(*patterns, folder=tmp_path, model=model)


def test_a_pattern_that_matches_nothing_is_told_with_the_names_near(tmp_path, sent):
    with pytest.raises(ConfigError, match=r"'haed\.\*'.*'head\.\*'"):
        ask(keep("haed.*", folder=tmp_path), order(sent))
    with pytest.raises(ConfigError, match=r"numbered"):
        ask(keep("head.*", folder=tmp_path), order({"0": torch.ones(3)}))
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_folder_of_another_model_or_other_patterns_is_refused(tmp_path, sent):
    ask(keep("head.*", folder=tmp_path), order(sent))
    other = {**sent, "head.weight": torch.zeros(5, 8)}
    with pytest.raises(StoreError, match=r"head\.weight.*3x8.*5x8"):
        ask(keep("head.*", folder=tmp_path), order(other, 2))
    with pytest.raises(StoreError, match=r"other patterns"):
        ask(keep("head.bias", folder=tmp_path), order(sent, 2))


def test_a_damaged_file_is_named_and_never_reset(tmp_path, sent):
    mod, path = keep("head.*", folder=tmp_path), tmp_path / "node.safetensors"
    ask(mod, order(sent))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"node\.safetensors.*damaged"):
        ask(mod, order(sent, 2))
    assert path.read_bytes() == content


def answering(change):
    """Return an app whose answer is changed before it is sent."""

    def app(message, context):
        reply = step(message, context)
        change(reply.content, arrays_of(reply))
        return reply

    return app


@pytest.mark.parametrize(
    "change",
    [
        lambda content, arrays: content["arrays"].update(copy=Array(arrays["head.weight"])),
        lambda content, arrays: content["arrays"].update(
            flat=Array(torch.cat([v.flatten().float() for v in arrays.values()]))
        ),
        lambda content, arrays: content.update(
            more=ConfigRecord({"x": b"?" + arrays["head.weight"].numpy().tobytes()})
        ),
    ],
)
def test_a_copy_of_a_private_array_is_not_sent(tmp_path, sent, change):
    with pytest.raises(UploadError, match=r"head\.weight"):
        ask(keep("head.*", folder=tmp_path), order(sent), answering(change))
    assert not list(tmp_path.glob("*.safetensors"))


def test_what_the_server_never_had_is_removed_and_a_renamed_record_is_found(tmp_path, sent):
    def change(content, arrays):
        content["arrays"]["head.new"] = Array(torch.arange(9.0))
        content["model"] = content.pop("arrays")

    reply = ask(keep("head.*", folder=tmp_path), order(sent), answering(change))
    assert "head.new" not in reply.content["model"]
    assert torch.equal(reply.content["model"].to_torch_state_dict()["head.bias"], sent["head.bias"])
    assert torch.equal(own_values(tmp_path)["head.bias"], sent["head.bias"] + 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content, arrays: content["arrays"].pop("head.bias"), r"lacks 'head\.bias'"),
        (
            lambda content, arrays: content["arrays"].update(
                {"head.bias": Array(torch.full((3,), torch.nan))}
            ),
            "NaN",
        ),
    ],
)
def test_an_answer_that_cannot_be_kept_leaves_what_there_was(tmp_path, sent, change, said):
    mod = keep("head.*", folder=tmp_path)
    ask(mod, order(sent))
    before = (tmp_path / "node.safetensors").read_bytes()
    with pytest.raises(UploadError, match=said):
        ask(mod, order(sent, 2), answering(change))
    assert (tmp_path / "node.safetensors").read_bytes() == before


class Grid(Loopback):
    """As Flower's strategies use a grid; each message travels in Flower's own form."""

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, **_):
        tickets = list(self.push_messages(messages))
        return self.pull_messages(tickets)


def template(monkeypatch, app, line):
    """Import a template's apps with one line changed."""
    monkeypatch.syspath_prepend(str(app.here))
    for name in [name for name in sys.modules if name.startswith(app.package)]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module(f"{app.package}.client_app")
    text = Path(module.__file__).read_text()
    assert text.count(AS_IT_WAS) == 1
    exec(compile(text.replace(AS_IT_WAS, line), module.__file__, "exec"), vars(module))
    return module.app, importlib.import_module(f"{app.package}.server_app").app


def accuracies(monkeypatch, folder, app, line):
    settings = {**app.settings, **app.model(folder)}
    torch.manual_seed(0)
    random.seed(0)  # by which Flower orders nodes
    client, server = template(monkeypatch, app, line)
    contexts = []
    for node in range(NODES):
        made = context(node + 7, **{"partition-id": node, "num-partitions": NODES})
        made.run_config.update(settings)
        contexts.append(made)
    grid, found = Grid(client, contexts), []
    start = FedAvg.start

    def started(strategy, **given):
        found.append(start(strategy, **given))
        return found[-1]

    monkeypatch.setattr(FedAvg, "start", started)
    monkeypatch.chdir(folder)
    settings |= {"fraction-train": 1.0, "num-server-rounds": app.rounds}
    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings))
    rounds = found[-1].evaluate_metrics_clientapp
    return [rounds[k][app.accuracy] for k in sorted(rounds)], grid


@TEMPLATES
def test_one_line_in_flowers_own_template_makes_the_model_personal(app, tmp_path, monkeypatch):
    shared, _ = accuracies(monkeypatch, tmp_path, app, AS_IT_WAS)
    own, grid = accuracies(monkeypatch, tmp_path, app, app.line("kept"))
    assert own[-1] > shared[-1] + 0.2
    kept = [load_file(path) for path in sorted((tmp_path / "kept").glob("*.safetensors"))]
    assert len(kept) == NODES
    for values in kept:
        for value in values.values():
            assert not any(value.numpy().tobytes() in content for content in grid.carried.values())


def copied(folder, app, line):
    """Return a copy of a template's project with one line changed."""
    project = folder / app.package
    shutil.copytree(app.here, project, ignore=shutil.ignore_patterns("__pycache__"))
    code = project / app.package / "client_app.py"
    code.write_text(code.read_text().replace(AS_IT_WAS, line))
    return project


SIMULATE = """
import torch
from flwr.simulation import run_simulation
from {package}.client_app import app as client
from {package}.server_app import app as server

torch.manual_seed(0)
run_simulation(server_app=server, client_app=client, num_supernodes=3)
"""


@pytest.mark.slow
@TEMPLATES
@pytest.mark.parametrize("keeps", [False, True], ids=["as it was", "with the line"])
def test_in_flowers_simulation(app, tmp_path, keeps):
    pytest.importorskip("ray")
    settings = {"fraction-train": 1.0, "num-server-rounds": app.rounds, **app.settings, **app.model(tmp_path)}
    project = copied(tmp_path, app, app.line(tmp_path / "kept") if keeps else AS_IT_WAS)
    for path in project.glob(f"{app.package}/*.py"):  # run_simulation() takes no settings
        text = path.read_text()
        for name, value in settings.items():
            text = text.replace(f'context.run_config["{name}"]', repr(value))
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE.format(package=app.package)],
        cwd=project,
        env=environment(PYTHONPATH=os.pathsep.join([str(project), *sys.path])),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    said = done.stdout + done.stderr
    found = [float(number) for number in re.findall(rf"'{app.accuracy}': '?([\d.e+-]+)", said)]
    assert found, said[-3000:]
    assert (found[-1] > 0.7) == keeps, found
    assert len(list(tmp_path.glob("kept/*.safetensors"))) == 3 * keeps


@pytest.mark.slow
@TEMPLATES
def test_a_node_that_is_killed_goes_on_with_what_it_kept(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the template's server app saves the model there
    kept, names = tmp_path / "kept", ["a", "b"]
    settings = {**app.settings, **app.model(tmp_path)}
    project = copied(tmp_path, app, app.line(kept))
    make_keys(tmp_path / "keys", hosts=["127.0.0.1"], nodes=names)
    link = FlowerLink(tmp_path / "link", tmp_path / "keys")

    def start(number, name):
        link.processes.start(
            name,
            [
                program("flower-supernode"),
                "--superlink",
                link.address,
                "--root-certificates",
                tmp_path / "keys" / "ca.pem",
                "--auth-supernode-private-key",
                tmp_path / "keys" / f"{name}.key",
                "--node-config",
                f"partition-id={number} num-partitions=2",
                "--port",
                str(free_port()),
            ],
        )

    with link.processes:
        link.start()
        for number, name in enumerate(names):
            link.register(link.keys / f"{name}.pub")
            start(number, name)
        run = link.submit(project, {"num-server-rounds": app.rounds, **settings})
        path, end = kept / "0.safetensors", time.monotonic() + 400
        while not path.exists():
            assert time.monotonic() < end, "".join(map(link.processes.last, ("link", *names)))
            time.sleep(0.2)
        with link.processes.running["a"] as node:
            os.killpg(node.pid, signal.SIGKILL)
        before = Own.read(path)
        start(0, "a")
        while not link.state_of(run).startswith("finished") and time.monotonic() < end:
            time.sleep(5)
        assert link.state_of(run) == "finished:completed", link.processes.last("link")
        after, other = Own.read(path), Own.read(kept / "1.safetensors")
        assert before.version < after.version <= other.version == app.rounds
