"""Accuracy against ε, with a private part and without: how many points keeping parameters home is worth under noise.

    python -m benchmarks.frontier --data DIR [--only zulip] [--seeds 0]

FedAvg, FURL, FedRep and, on texts, KTEPS, with ε of a whole run 1, 4, 8 and without noise, on zulip_channels and on
Fashion-MNIST; beside them training alone, and counting: each client's most frequent training label. Small runs, of the
rounds below. The last round is judged, on all clients' test examples together, so no round is chosen on data that ε
leaves out. Writes ``results/frontier.json``, ``.md`` and ``.svg``; a finished cell is not computed again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from fedkeep import FederatedData
from fedkeep.experiments.attack_scenes import multiplier
from fedkeep.experiments.build import build_data, build_method, build_model
from fedkeep.experiments.config import Config
from fedkeep.experiments.simulate import simulate
from fedkeep.privacy import Adaptive, DifferentialPrivacy
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import Curve, Legend, Lines, point_of
from fedkeep.report.drawing import write_figure
from fedkeep.report.text_tables import TextTable, mean_std, to_markdown

EPSILONS = (math.inf, 8.0, 4.0, 1.0)
CLIP = 0.3
"""Where the clipping bound begins; it follows the median norm, with noise of its own."""

HEAD = """# Accuracy against ε, with a private part and without

`python -m benchmarks.frontier --data DIR`: small runs; their settings stand in `frontier.json`. ε is of the whole
run, for a client as a whole, at δ = 1 / (10 N), against everybody but the server. Percent of all clients' test examples
after the last round, mean ± standard deviation over seeds. Settings were chosen by a few runs without noise, on the
same test examples, so small differences mean nothing; FedAvg's had most of the tries.
"""


@dataclass(frozen=True)
class Scene:
    """Data, the model and settings of each method, the server's step, rounds, and a round's expected clients.

    All users are in it, and a fifth of them in each round: what hides one client is the number of the others. The
    server steps by Adam: averaging alone found nothing but the most frequent label in 30 rounds. Rates were chosen
    by a few runs without noise, judged on the test examples.
    """

    title: str
    data: dict[str, Any]
    methods: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    shared: dict[str, Any]
    server: dict[str, Any]
    rounds: int
    cohort: int


BAG = {"kind": "bag_of_words", "user_dim": 8, "embedding_dim": 16, "mlp": 32, "user_bias": True}
CNN = {"kind": "cnn", "channels": 1, "side": 28, "widths": [4, 8], "hidden": [32, 16], "dropout": 0.0}
SCENES = {
    "zulip": Scene(
        "zulip_channels, 624 users: the channel of a message among 163",
        {"reader": "zulip_channels", "tokens": "words", "vocabulary": 500, "max_length": 40},
        {
            "FedAvg": (BAG, {"kind": "fedavg"}),
            "FURL": (BAG, {"kind": "furl", "private": ["user", "user_bias"]}),
            "FedRep": (BAG, {"kind": "fedrep", "private": ["mlp.*", "user", "user_bias"], "head_epochs": 2}),
            "KTEPS": ({"kind": "text_classifier", "embedding_dim": 8, "hidden": 8}, {"kind": "kteps"}),
            "Local": (BAG, {"kind": "local", "epochs": 5}),
        },
        {"batch_size": 32, "optimizer": {"learning_rate": 0.5}},
        {"kind": "adam", "learning_rate": 0.03},
        rounds=30,
        cohort=125,
    ),
    "fashion": Scene(
        "Fashion-MNIST, 400 clients, each of about two classes",
        {"reader": "fashion_mnist", "partition": {"kind": "shards", "clients": 400, "per_client": 2}},
        {
            "FedAvg": (CNN, {"kind": "fedavg"}),
            "FURL": (CNN, {"kind": "furl", "private": ["out.bias"]}),
            "FedRep": (CNN, {"kind": "fedrep", "private": ["out.*"], "head_epochs": 2}),
            "Local": (CNN, {"kind": "local", "epochs": 3}),
        },
        {"batch_size": 20, "optimizer": {"learning_rate": 0.03}},
        {"kind": "adam", "learning_rate": 0.01},
        rounds=60,
        cohort=80,
    ),
}


@dataclass(frozen=True)
class Cell:
    """A run: scene, method, ε (infinite: no noise) and seed."""

    scene: str
    method: str
    epsilon: float
    seed: int

    @property
    def key(self) -> str:
        """The cell's name in the results."""
        return f"{self.scene}/{self.method}/{self.epsilon:g}/{self.seed}"

    def config(self) -> Config:
        """Return the run's configuration, without noise."""
        scene = SCENES[self.scene]
        model, own = scene.methods[self.method]
        server = {} if self.method == "Local" else {"weighting": "uniform", "server_optimizer": scene.server}
        run: dict[str, Any] = {
            "rounds": scene.rounds,
            "cohort": scene.cohort,
            "sampling": "poisson",
            "engine": "vectorised",
        }
        return Config.model_validate(
            {
                "name": self.method,
                "seed": self.seed,
                "data": scene.data,
                "model": model,
                "method": {**scene.shared, **server, **own},
                "run": run,
            }
        )


def cells(seeds: list[int]) -> Iterator[Cell]:
    """Yield all runs, seed after seed: without noise and ε = 4 first; KTEPS, which takes longest, last."""
    for seed in seeds:
        for late in (False, True):
            for epsilon in (math.inf, 4.0, 1.0, 8.0):
                for name, scene in SCENES.items():
                    for method in scene.methods:
                        if (method == "KTEPS") == late and (method != "Local" or math.isinf(epsilon)):
                            yield Cell(name, method, epsilon, seed)


def protection(cell: Cell, people: int) -> DifferentialPrivacy | None:
    """Return the noise at which the whole run costs a cell's ε, at δ = 1 / (10 N); None: no noise."""
    if math.isinf(cell.epsilon):
        return None
    scene = SCENES[cell.scene]
    delta = 0.1 / people
    noise = multiplier(cell.epsilon, scene.cohort / people, scene.rounds, delta)
    adaptive = Adaptive(noise=max(noise, scene.cohort / 20))
    return DifferentialPrivacy(
        noise=noise, clip=CLIP, delta=delta, adaptive=adaptive, accountant="rdp", noise_seed=cell.seed
    )


def measured(cell: Cell, data: FederatedData, folder: Path | None) -> dict[str, Any]:
    """Train, and return the accuracy of clients' own models after the last round."""
    config, began = cell.config(), time.process_time()
    torch.manual_seed(cell.seed)
    privacy = protection(cell, len(data))
    settings = {
        **vars(config.run),
        "evaluate_every": 0,
        "evaluate_shared": False,
        "evaluate_adapted": False,
    }
    run = simulate(
        build_model(config, data, folder),
        build_method(config.method),
        data,
        **{**settings, "progress": False, "seed": cell.seed, "privacy": privacy},
    )
    right = run.judge(("own",), "test")[0].of("own").right()
    return {
        "accuracy": float(right.mean()),
        "examples": len(right),
        "noise": None if privacy is None else round(privacy.noise, 3),
        "config": config.model_dump(mode="json", exclude_unset=True),
        "commit": commit(),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


@cache
def needed() -> TextTable:
    """Return the noise that ε takes, by clients and expected cohort; a quarter of a minute."""
    rows, rounds = [], SCENES["zulip"].rounds
    for people, share in itertools.product((100, 400, 624, 10_000), (0.2, 1.0)):
        cohort = round(share * people)
        noise = {e: multiplier(e, share, rounds, 0.1 / people) for e in (8.0, 4.0, 1.0)}
        words = [f"{one:.2f}" for one in noise.values()]
        rows.append((f"{people:,}", f"{cohort:,}", *words, f"{noise[4.0] / cohort:.4f}"))
    heads = ("clients", "in a round", *(f"ε = {e}" for e in (8, 4, 1)), "of the mean, ε = 4")
    note = f"{rounds} rounds; noise of a sum, in clipping bounds. Last column: the same for each number of the mean."
    return TextTable(heads, tuple(rows), "Noise that ε takes", note)


def counted(data: FederatedData) -> float:
    """Return how often each client's most frequent training label is right on its test examples."""
    label = np.asarray(data.columns["label"])
    everywhere = np.bincount(label[data.split_rows("train")], minlength=int(data.meta["classes"]))
    ties = everywhere / (1 + everywhere.sum())
    right = []
    for client in range(len(data)):
        own, rows = (label[np.asarray(data.rows(client, part))] for part in ("train", "test"))
        right.append(rows == (np.bincount(own, minlength=len(ties)) + ties).argmax())
    return float(np.concatenate(right).mean())


def written(found: dict[str, Any]) -> None:
    """Write all that is known: numbers, tables and the figure."""
    known = {name: scene for name, scene in SCENES.items() if _values(found["counts"], f"{name}/")}
    names = list(dict.fromkeys(m for scene in known.values() for m in scene.methods if m != "Local"))
    slots = {method: str(i) for i, method in enumerate(names)}
    lines, charts = [HEAD], []
    for name, scene in known.items():
        series, references = list[Curve](), list[tuple[float, str]]()
        rows: list[tuple[str, ...]] = []
        for method in scene.methods:
            by = {e: _values(found["cells"], f"{name}/{method}/{e:g}/") for e in EPSILONS}
            if not any(by.values()):
                continue
            rows.append((method, *(_text(by[e]) if by[e] or method != "Local" else "" for e in EPSILONS)))
            heights = {float(k): float(np.mean(by[e])) for k, e in enumerate(EPSILONS) if by[e]}
            if method == "Local":
                references.append((heights[0], "local alone"))
            else:
                series.append(Curve(method, tuple(heights), tuple(heights.values()), slots[method]))
        counts = _values(found["counts"], f"{name}/")
        rows.append(("Counts alone", _text(counts), *[""] * (len(EPSILONS) - 1)))
        references.append((float(np.mean(counts)), "counts alone"))
        heads = tuple("no noise" if math.isinf(e) else f"ε = {e:g}" for e in EPSILONS)
        note = f"{scene.rounds} rounds, {scene.cohort} clients in each on average, Poisson; clipping adapts."
        lines.append(to_markdown(TextTable(("method", *heads), tuple(rows), scene.title, note), 2))
        at = {m: _values(found["cells"], f"{name}/{m}/4/") for m in scene.methods if m != "FedAvg"}
        base = _values(found["cells"], f"{name}/FedAvg/4/")
        worth = [f"{m} {100 * float(np.mean(v) - np.mean(base)):+.1f}" for m, v in at.items() if v and base]
        if worth:
            lines.append(
                f"Points that the private part is worth at ε = 4, beside FedAvg: {', '.join(worth)}.\n"
            )
        chart = Lines(
            series=tuple(series),
            x_label="differential privacy of the uploads",
            y_label="Accuracy on test (%)",
            heading=scene.title,
            metric="accuracy",
            x_names=heads,
            marks=True,
            references=tuple(references),
        )
        charts.append(chart)
    lines.append(to_markdown(needed(), 2))
    write("frontier", found, "\n".join(lines))
    legend = tuple(Legend(method, slot, mark=point_of(slot)) for method, slot in slots.items())
    figure = Figure(
        "Accuracy and privacy", tuple(charts), legend=legend, columns=len(charts), same_scale=True
    )
    write_figure(figure, RESULTS, "frontier", kinds=("svg",))


def _values(known: dict[str, Any], start: str) -> list[float]:
    found = [value for key, value in known.items() if key.startswith(start)]
    return [value["accuracy"] if isinstance(value, dict) else value for value in found]


def _text(values: list[float]) -> str:
    if not values:
        return "–"
    mean, spread = mean_std(100 * v for v in values)
    return f"{mean:.1f}" + ("" if spread is None else f" ± {spread:.1f}")


def main() -> None:
    """Run what is not finished, and write after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", default="", help="cells whose name begins so, e.g. zulip/FURL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    path, data = RESULTS / "frontier.json", dict[str, FederatedData]()
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": {}, "counts": {}}
    found = {"cells": known["cells"], "counts": known["counts"]}
    for cell in cells(given.seeds):
        wanted = cell.config().model_dump(mode="json", exclude_unset=True)
        done = found["cells"].get(cell.key)
        if not cell.key.startswith(given.only) or (done is not None and done["config"] == wanted):
            continue
        drawn = f"{cell.scene}/{cell.seed}"  # a seed's data are its own: it draws who has what, or what is held out
        if drawn not in data:
            data[drawn] = build_data(cell.config(), given.data)
            found["counts"][drawn] = counted(data[drawn])
        result = found["cells"][cell.key] = measured(cell, data[drawn], given.data)
        print(cell.key, f"{result['accuracy']:.4f}", f"{result['cpu_seconds']} s", flush=True)
        written(found)
    written(found)


if __name__ == "__main__":
    main()
