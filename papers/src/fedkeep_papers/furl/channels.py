"""``fedkeep reproduce furl-channels``: what federation adds to what a user's own messages tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep import Phase, adagrad, averaging, methods, sgd, simulate
from fedkeep.core.errors import NonFiniteError, RoundError
from fedkeep.core.files import write_whole
from fedkeep.data import FederatedData
from fedkeep.data.readers.opened_files import sha256
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.reproductions import Request
from fedkeep.metrics.worth.intervals import users_like_these
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.furl.memory import HALF_LIFE, NEIGHBOURS, RECENT, SHRINK, Array
from fedkeep_papers.furl.own_counts import PAIRS, REVISION, WORDS, Order, TextAndCounts, messages
from fedkeep_papers.furl.scoring import GRID, HALF_LIVES, Scored, counted, judged_ids, memories, mixed, scored
from fedkeep_papers.kit.cells import LATER, Finished, Slot, digest, note_on_stale, runs_of
from fedkeep_papers.kit.data import needs_data
from fedkeep_papers.kit.results import over_seeds, write_results

NAME = "furl-channels"
ORDERS: Mapping[Order, str] = {"time": "split by time", "random": "random split"}
ROWS = {
    "counting": ("counting", "local"),
    "decayed": ("counting, decayed", "local"),
    "local": ("local memory alone", "local"),
    "global": ("federated text, one model for all", "text"),
    "prior": ("federated text + private count prior", "own"),
    "memory": ("federated text + private count prior and memory", "own"),
}
"""Rows of the tables: the title, and the cell that it is read from."""
RECIPE: Mapping[str, Any] = {
    "dim": 64,
    "dropout": 0.3,
    "word_dropout": 0.3,
    "batch_size": 16,
    "cohort": 10,
    "local_rate": 1.0,
    "server": "adagrad",
    "server_rate": 0.2,
    "server_eps": 1e-4,
    "epochs": 3,
}
ABOUT = """\
The channel of a message of `zulip_channels`, of 163, from its words and its author. By time, each user's first 80 % of
messages train, the next 10 % validate and the last 10 % test. In the random split half of the test messages lie within
ten minutes of a training message of the same user, nearly always in the same channel: it is too easy.

Private are a user's counts of channels (an offset to the logits that leaves out an example's own label in training;
by time, recent messages weigh more), and a memory: naive Bayes over the user's own words, and the most similar own
messages. A device computes these by itself, and uploads none of them. "Local memory alone" is all of that without any
training or federation.

The shared text model is a bag of words and pairs of words, 131,072 hashed ids, trained by FedAvg with Adagrad at the
server. Three weights, of the text, of naive Bayes and of the similar messages, are one for all users, chosen on valid.
The recipe is the best with the prior on valid of eight with Adagrad, run at random, and was taken over by time.
Before these came five with Adam by time, two of which had been judged on test; all choices were made on valid."""


@dataclass(frozen=True)
class Found:
    """A cell's rows by name, and the ids of the rows' users in their order."""

    rows: dict[str, Scored]
    ids: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True)
class Cell:
    """What is computed at once: the rows that need no training (``local``), or those of one federated model.

    ``users`` says how many are read; None: all.
    """

    order: Order
    part: str
    seed: int
    users: int | None
    data: Path | None
    runs: Path
    slot_folder: Path
    source: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """For ``--only``, and the begin of the names of the run's folder and its file."""
        return f"channels-{self.order}-{self.part}" + ("" if self.part == "local" else f"-{self.seed}")

    @property
    def slot(self) -> Slot[Found]:
        """Where the result is kept."""
        trained = (
            {}
            if self.part == "local"
            else {"recipe": dict(RECIPE), "text": list(GRID["text"]), "seed": self.seed}
        )
        same = {"cell": NAME, "order": self.order, "part": self.part, "users": self.users}
        settings = {**same, "ids": [WORDS, PAIRS], **trained, **self._own()}
        file = self.slot_folder / f"{self.name}-{digest(settings, dict(self.source))}.json"
        revision = REVISION if (self.order, self.part) == ("time", "own") else 0
        return Slot(
            kind=Found,
            file=file,
            settings=settings,
            source=dict(self.source),
            rounded=True,
            revision=revision,
        )

    def _own(self) -> dict[str, Any]:
        """Return what the own counts and the memory depend on; the text alone has neither."""
        if self.part == "text":
            return {}
        memory = {"shrink": SHRINK, "neighbours": NEIGHBOURS}
        weights = {name: list(GRID[name]) for name in ("bayes", "votes")}
        prior = {"prior": {"half_life": HALF_LIFE, "recent": RECENT}} if self.order == "time" else {}
        counts = {"half_lives": list(HALF_LIVES)} if self.part == "local" else {}
        return {"memory": memory, **weights, **prior, **counts}

    @property
    def fault(self) -> Path:
        """The file that says why training with these settings broke down."""
        return self.runs / f"{self.slot.run}-fault.txt"

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Compute the cell, or go on with its run, and leave its file, or its fault; see ``places.LongJob``."""
        try:
            self.slot.write(self.found(alone, progress))
        except (NonFiniteError, RoundError) as error:
            self.runs.mkdir(parents=True, exist_ok=True)
            write_whole(self.fault, f"{error}\n".encode())

    def found(self, alone: bool, progress: bool | None) -> Found:
        """Compute the cell."""
        folder = (self.data or Path()) / "zulip_channels"  # source_of has read it
        data = messages(folder, self.order, self.users)
        return Found(self.rows(data, alone, progress), judged_ids(data))

    def rows(self, data: FederatedData, alone: bool, progress: bool | None) -> dict[str, Scored]:
        """Return the cell's rows, which are computed."""
        if self.part == "local":
            return counted(data) | {"local": mixed(data, memories(data), None)}
        logits = self.trained(data, alone, progress)
        if self.part == "text":
            return {"global": scored(data, logits, {})}
        return {"prior": mixed(data, None, logits), "memory": mixed(data, memories(data), logits)}

    def trained(self, data: FederatedData, alone: bool, progress: bool | None) -> dict[str, Array]:
        """Train by FedAvg; return the text's logits without the counts, (n, C), by split."""
        torch.manual_seed(self.seed)
        regular = {name: RECIPE[name] for name in ("dropout", "word_dropout")}
        model = TextAndCounts(
            int(data.meta["classes"]), counts=self.part == "own", embedding_dim=RECIPE["dim"], **regular
        )
        folder = self.runs / self.slot.run
        run = simulate(
            model,
            recipe(),
            data,
            epochs=RECIPE["epochs"],
            cohort=RECIPE["cohort"],
            seed=self.seed,
            engine="sequential" if not alone else "auto",
            workers=1,
            evaluate_every=0,
            out=folder,
            resume=(folder / "run.json").exists(),
            progress=progress,
        )
        model.load_state_dict(dict(run.server), strict=False)
        return {split: text_logits(model, data, split) for split in ("valid", "test")}


def recipe() -> methods.Method:
    """Return FedAdagrad: every parameter is federated, what is private stands in the data."""
    local = Phase(optimizer=sgd(RECIPE["local_rate"], schedule="linear"), batch_size=RECIPE["batch_size"])
    step = adagrad(RECIPE["server_rate"], eps=RECIPE["server_eps"], schedule="linear")
    return methods.fedavg(local=local, server=averaging(step))


def text_logits(model: TextAndCounts, data: FederatedData, split: str) -> Array:
    """Return the shared text's logits of a split's examples, (n, C)."""
    model.eval()
    parts = []
    with torch.no_grad():
        for rows in np.array_split(data.split_rows(split), max(1, data.counts(split).sum() // 512)):
            batch = data.batch(rows)
            parts.append(model.head(model.features(batch["text"], batch["text_length"])).numpy())
    return np.concatenate(parts)


def source_of(data: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the sha256 of the files of data.

    Raises:
        DataError: the folder is not named, or lacks a file.
    """
    if data is None:
        raise needs_data(NAME)
    folder = data / "zulip_channels"
    return tuple((n, sha256(folder / n)) for n in ("messages.jsonl.gz", "channels.tsv"))


def channels(request: Request) -> Path:
    """Compute what is not finished, and write the tables; it goes on where it stopped.

    ``quick`` takes 40 users and one seed, ``medium`` all users and one seed, ``full`` three seeds.

    Raises:
        DataError: the folder of data is not named, or lacks a file.
        ConfigError: ``request.only`` names a run that there is not.
    """
    source, runs = source_of(request.data), runs_of(request.out)
    quick = request.scale == "quick"
    seeds = (
        tuple(request.seeds) if request.seeds is not None else (0, 1, 2) if request.scale == "full" else (0,)
    )
    place = (
        request.data,
        runs / f"{NAME}-{request.scale}",
        runs / "channels-quick" if quick else request.out / "channels",
    )
    cells = [
        Cell(order, part, seed, 40 if quick else None, *place, source)
        for seed in seeds
        for order in ORDERS
        for part in ("local", "own", "text")
        if part != "local" or seed == seeds[0]
    ]
    request.check([cell.name for cell in cells])

    def write() -> Path:
        return written(request, cells)

    wanted = (cell for cell in cells if request.wants(cell.name) and not cell.fault.exists())
    todo = [cell for cell in wanted if cell.slot.read() is None]
    run_long_jobs(todo, request.jobs, request.progress, write, on=request.on)
    return write()


def written(request: Request, cells: Sequence[Cell]) -> Path:
    """Write the tables of what is finished."""
    finished = {cell: f for cell in cells if (f := cell.slot.find()) is not None}
    rows, gains = [], []
    for order, title in ORDERS.items():
        by_part: dict[str, dict[int, Finished[Found]]] = {}
        for cell, f in finished.items():
            if cell.order == order:
                by_part.setdefault(cell.part, {})[cell.seed] = f
        alone = by_part.get("local", {})
        for key, (name, part) in ROWS.items():
            found = by_part.get(part, {})
            own = {seed: f.result.rows[key] for seed, f in found.items()}
            for metric in ("test", "valid"):
                scene = title if metric == "test" else f"{title}, valid"
                values = {seed: float(asdict(row)[metric]) for seed, row in own.items()}
                rows.append(over_seeds(scene, name, "accuracy", values, found.values(), scale=request.scale))
            if part == "own" and own and alone:
                reference = np.asarray(next(iter(alone.values())).result.rows["local"].users)
                mean, low, high = 100 * users_like_these(
                    np.stack([np.asarray(r.users) for r in own.values()]) - reference
                )
                gains.append((title, name, f"{mean:+.2f} ({low:+.2f} to {high:+.2f})", str(len(own))))
    columns = ("split", "row", "points over local memory alone (95 % interval)", "seeds")
    note = "Paired over users on test; each user counts once. The accuracies below pool all messages."
    table = (
        to_markdown(TextTable(columns, tuple(gains), "Over local memory alone", note, left=2), level=2)
        if gains
        else ""
    )
    chosen = "\n".join(
        f"- {cell.name}, {ROWS[key][0]}: {', '.join(f'{n} {v:.4g}' for n, v in row.chosen.items())}"
        for cell, f in finished.items()
        for key, row in f.result.rows.items()
        if row.chosen
    )
    said = f"Chosen on valid:\n\n{chosen}" if chosen else ""
    recipe_said = "Recipe: " + ", ".join(f"`{n} = {v}`" for n, v in RECIPE.items()) + "."
    faults = {
        cell: cell.fault.read_text(encoding="utf-8").strip()
        for cell in cells
        if cell not in finished and cell.fault.exists()
    }
    broken = ", ".join(f"{cell.name} ({why.rstrip('.')})" for cell, why in faults.items())
    broken = f"**Broke down**: {broken}." if broken else ""
    unfinished = [cell.name for cell in cells if cell not in finished and cell not in faults]
    missing = f"**Not finished**: {', '.join(unfinished)}." if unfinished else ""
    stale = note_on_stale({cell.slot.file.stem: f for cell, f in finished.items()})
    text = "\n\n".join(part for part in (ABOUT, recipe_said, table, said, broken, missing, stale) if part)
    name = NAME if request.scale == "full" else f"{NAME}-{request.scale}"
    return write_results(
        request.out, name, rows, title="FURL on channels: what federation adds", preamble=text
    )[1]
