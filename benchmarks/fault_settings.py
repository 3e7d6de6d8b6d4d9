"""Hostile configurations and command lines, see ``benchmarks.fault_makers``."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.fault_makers import Trial, mutated, require, sound
from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.config import Config, parse_config, parse_overrides, read_config

BASE = """
name = "Toy"
seed = 0

[data]
reader = "toy"
users = 6
examples = 12

[model]
kind = "linear"

[method]
kind = "furl"
private = "user"
optimizer = { learning_rate = 0.1, rates = { user = 0.5 } }

[run]
rounds = 2
cohort = 3
"""
COMMANDS = {
    "check": ("--data", "--set"),
    "run": ("--data", "--out", "--seed", "--set", "--workers"),
    "evaluate": ("--data", "--split", "--device"),
    "personalize": ("--data", "--client", "--k", "--device", "--out"),
    "report": ("--out", "--title"),
    "reproduce": ("--data", "--seeds", "--only", "--jobs"),
}
KEYS = (
    "",
    "name",
    "seed",
    "data.reader",
    "data.users",
    "data.examples",
    "data.features",
    "data.classes",
    "data.task",
    "data.kind",
    "data.skew",
    "data.strength",
    "data.topics",
    "data.choices",
    "data.trait_size",
    "data.rate",
    "data.path",
    "data.folder",
    "data.split",
    "data.split.fractions",
    "data.split.order",
    "data.partition",
    "data.partition.kind",
    "data.opt_out",
    "data.opt_out.fraction",
    "data.opt_out.by",
    "model.kind",
    "model.features",
    "model.classes",
    "model.user_dim",
    "model.vocabulary",
    "model.embedding_dim",
    "model.hidden",
    "model.word_vectors",
    "method.kind",
    "method.private",
    "method.epochs",
    "method.batch_size",
    "method.loss.kind",
    "method.loss.l2",
    "method.loss.label",
    "method.mu",
    "method.optimizer",
    "method.optimizer.kind",
    "method.optimizer.learning_rate",
    "method.optimizer.betas",
    "method.optimizer.rates",
    "method.server_optimizer.momentum",
    "method.adapt.epochs",
    "method.clip_norm",
    "run.rounds",
    "run.epochs",
    "run.cohort",
    "run.sampling",
    "run.engine",
    "run.workers",
    "run.device",
    "run.evaluate_every",
    "run.hold_out",
    "run.on_nonfinite",
    "personalization.steps",
    "#",
    "a.b.c",
    '"run".rounds',
    "run.",
    "[data]",
)
USUAL = (
    ("seed", "3"),
    ("name", '"Zoë \\u202e"'),
    ("data.users", "3"),
    ("data.examples", "1"),
    ("data.features", "2"),
    ("data.classes", "2"),
    ("data.task", '"regression"'),
    ("data.task", '"binary"'),
    ("data.reader", '"many_user_text"'),
    ("data.split.fractions", "[0.5, 0.0, 0.5]"),
    ("data.split.order", '"random"'),
    ("data.opt_out", "{fraction = 0.5, by = 'example'}"),
    ("method.kind", '"fedavg"'),
    ("method.kind", '"fedprox"'),
    ("method.private", '["user", "out*"]'),
    ("method.epochs", "2"),
    ("method.batch_size", "1"),
    ("method.loss.smoothing", "0.1"),
    ("method.optimizer.kind", '"adam"'),
    ("method.optimizer.learning_rate", "0.0"),
    ("method.optimizer.rates", "{user = 1}"),
    ("method.server_optimizer", "{momentum = 0.9}"),
    ("method.adapt", "{epochs = 0}"),
    ("run.cohort", "1"),
    ("run.sampling", '"independent"'),
    ("run.engine", '"sequential"'),
    ("run.hold_out", "0.5"),
    ("run.evaluate_every", "0"),
    ("personalization", "{steps = 1}"),
)
VALUES = (
    "9" * 5000,
    "[" * 3000,
    "[" * 25 + "]" * 25,
    '"' + "x" * 20000 + '"',
    '"' + "x" * 300 + '"',
    "[1, [2]]",
    "{a = 1}",
    '"\\u0000"',
    '["user", "h*"]',
    "[0.8, 0.1, 0.1]",
    "[0, 1, 0]",
    "{kind = 'majority', clients = 1000000000, p = 0.5, train = 1, valid = 1}",
    "# nothing",
    "1\n2",
    "0",
    "1",
    "-1",
    "2.5",
    "inf",
    "nan",
    "-inf",
    "true",
    '""',
    '"x"',
    "x",
    "[]",
    "{}",
    "1e308",
    "1e-308",
    "9223372036854775807",
    "9223372036854775808",
    "1000000000",
    "1000000",
    "[" * 25 + "]" * 25,
    '"../../.."',
    '"/"',
    '"/dev/null"',
    "1979-05-27T07:32:00Z",
    '"toy"',
    '"many_user_text"',
    '"table"',
    '"movielens"',
    '"saved"',
    '"majority"',
    '"dirichlet"',
    '"document"',
    '"bag_of_words"',
    '"text_classifier"',
    '"cnn"',
    '"mixture_of_experts"',
    '"os:path"',
    '"torch.nn:Linear"',
    '"nowhere:Thing"',
    '"fedavg"',
    '"local"',
    '"fedprox"',
    '"binary"',
    '"regression"',
    '"adam"',
    '"cosine"',
    '"["',
    '"*"',
    "'",
    "0x10",
    "1_0",
)


def _overrides(random: Random, least: int = 1) -> dict[str, str]:
    found = {}
    for _ in range(random.randint(least, 3)):
        key, usual = random.choice(USUAL)
        found[key if random.random() < 0.7 else random.choice(KEYS)] = (
            usual if random.random() < 0.7 else random.choice(VALUES)
        )
    return found


def plain(config: Config) -> str:
    """Return a configuration as text: NaN equals nothing, not even itself."""
    return json.dumps(config.model_dump(), sort_keys=True, default=str)


def configuration(random: Random, folder: Path) -> Trial:
    """A configuration with odd settings or damaged text: parsed, and data, model and method made from it."""
    from fedkeep.experiments.build import build_data, build_method, build_model

    damaged = random.random() < 0.3
    (folder / "c.toml").write_bytes(mutated(random, BASE.encode()) if damaged else BASE.encode())
    given = [f"{key}={value}" for key, value in _overrides(random, 0 if damaged else 1).items()]

    def trial() -> None:
        config, text = read_config(folder / "c.toml", parse_overrides(given))
        require(
            plain(parse_config(text)) == plain(config), "the configuration that is written gives another one"
        )
        method = build_method(config.method)
        data = build_data(config, folder)
        sound(data)
        model = build_model(config, data, folder)
        method.check(method.extend(model) if method.extend else model)

    return trial


def command(random: Random, folder: Path) -> Trial:
    """A command line with odd arguments and settings, in a folder with odd things in it."""
    from typer.testing import CliRunner

    from fedkeep.cli import app

    (folder / "c.toml").write_text(BASE, encoding="utf-8")
    (folder / "folder").mkdir()
    (folder / "file").write_bytes(random.randbytes(20))
    (folder / "link").symlink_to("nowhere")
    places = (
        "c.toml",
        "folder",
        "file",
        "link",
        "nowhere",
        "x" * 300,
        "a/" * 3000,
        "",
        ".",
        "/",
        "demo",
        "\x1b[2J",
    )
    words: list[Any] = [random.choice(("check", "check", *COMMANDS))]
    words.append("c.toml" if random.random() < 0.6 else random.choice(places))
    if words[0] in ("check", "run"):
        for key, value in _overrides(random, 0).items():
            words += ["--set", f"{key}={value}"]
    for option in random.sample(COMMANDS[words[0]], random.randrange(2)):
        words += [option, random.choice((*places, "1", "9" * 5000))]
    if words[0] == "run":  # as far as the run's folder: what comes after is the business of engines
        words += ["--resume"]

    def trial() -> None:
        before = Path.cwd()
        os.chdir(folder)
        try:
            result = CliRunner().invoke(app, words, prog_name="fedkeep")
        finally:
            with contextlib.suppress(OSError):
                os.chdir(before)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        require(result.exit_code in (0, 1, 2), f"exit code {result.exit_code}")
        require("\x1b" not in result.output, "an escape sequence in the output")
        if result.exit_code == 2:
            raise FedkeepError(result.output)

    return trial
