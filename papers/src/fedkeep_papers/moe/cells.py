"""Cells of the mixture of experts' tables: one run of FedAvg, and every client's models from it.

A cell leaves small JSON files with each client's accuracies; what is there for the same settings is not computed
again, so tables go on where they stopped and share their cells. A federated run is resumable itself; the experts that
several ways start from are kept beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import read_tensors, write_tensors
from fedkeep.core.params import Params
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import FederatedData, ImageSet
from fedkeep.data.ids import SomeIds
from fedkeep.experiments.build import (
    build_method,
    build_model,
    read_source,
    run_config,
)
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.personalize import adapt_clients, rooted
from fedkeep.experiments.places import Place
from fedkeep.experiments.run import Run
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import Method
from fedkeep_papers.kit.cells import Slot, digest
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import Scene, clients_of, source_of
from fedkeep_papers.moe.variants import (
    Variant,
    adapting_method,
    from_given_experts,
    mixture_model,
)

SHOWN = 200  # images a class of the balanced test set, at most


@dataclass
class Work:
    """What one process needs to compute a cell.

    Attributes:
        cell: the cell.
        data_folder: the folder of real data.
        results: the folder of JSON files.
        runs: the folder of federated runs and experts.
        workers: processes that one cell may use; None: as ``simulate`` sees fit.
        progress: as for ``simulate``.
    """

    cell: Cell
    data_folder: Path | None
    results: Path
    runs: Path
    workers: int | None = None
    progress: bool | None = None
    _known: dict[str, Any] = field(default_factory=dict)

    def run(self, variants: Iterable[Variant]) -> None:
        """Compute the variants that are not there yet."""
        for variant in variants:
            slot = self.cell.slot(self.results, variant, self.source())
            if slot.read() is None:
                self._check_judged()
                slot.write(self.compute(variant), name=variant.name)

    def _check_judged(self) -> None:
        """Raise ConfigError where a client has nothing to be judged on: a cell keeps no number that is none."""
        for split in ("valid", "test"):
            counts = self.data().counts(split)
            if not counts.all():
                raise ConfigError(
                    "{count} of {counts} clients have no {split} images, so they have no "
                    "accuracy there. Give each client some, e.g. --set data.partition.{split}=100.",
                    count=int((counts == 0).sum()),
                    counts=len(counts),
                    split=split,
                )

    def compute(self, variant: Variant) -> Result:
        """Compute a variant."""
        began = time.perf_counter()
        found = self.adapted(variant)
        seconds = time.perf_counter() - began
        return Result(
            tuple(found.clients_frame("valid")["accuracy"].to_pylist()),
            tuple(found.clients_frame("test")["accuracy"].to_pylist()),
            self.balanced(found),
            tuple(found.stopped.get(c, ()) for c in found.clients),
            round(seconds, 1),
        )

    def adapted(self, variant: Variant) -> Run:
        """Return the clients with the models that a variant gives them."""
        if variant.kind == "fedavg":
            run = self.federated()
            return replace(run, clients=SomeIds(run.data.ids, np.arange(len(run.data))))
        method = adapting_method(variant, self.cell.adapting)
        if variant.kind != "mixture":
            return self.experts(variant, method)
        mixed = mixture_model(self.cell.scene, variant, self.data())
        whole = rooted(self.federated(), mixed, from_given_experts(method), "global_expert.")
        first = self.experts(variant.first, adapting_method(variant.first, self.cell.adapting))
        start = {c: {f"local_expert.{n}": v for n, v in first.own(c).items()} for c in first.clients}
        found = adapt_clients(whole, start=start, progress=self.progress)
        stopped = {c: (*first.stopped[c], *found.stopped[c][1:]) for c in found.clients}
        found.stopped = stopped
        return found

    def experts(self, variant: Variant, method: Method) -> Run:
        """Return clients after local training or fine-tuning; their models are kept for all that start from them."""
        kind = "-".join([variant.kind, *([variant.expert] if variant.expert else [])])
        name = f"{kind}{'-augmented' if variant.augment else ''}-wd{variant.weight_decay:g}.safetensors"
        file = self.folder(self.cell.name(variant), self.cell.settings(variant)) / name
        if variant.kind == "local":
            mixed = mixture_model(self.cell.scene, variant, self.data())
            own = mixed.get_submodule("local_expert")
            run = simulate(own, method, self.data(), rounds=0, seed=self.cell.scene.seed)
        else:
            federated = self.federated()
            run = rooted(federated, federated.net.module, method)
        if file.exists():
            return _loaded(run, file)
        found = adapt_clients(run, progress=self.progress)
        _keep(found, file)
        return found

    def folder(self, name: str, settings: Mapping[str, Any]) -> Path:
        """Return the folder of what is trained with these settings on these images: with others it is another one."""
        return self.runs / f"{name}-{digest(settings, self.source())}"

    def source(self) -> Mapping[str, str]:
        """Return the sha256 of the images' files."""
        return source_of(self.cell.scene, self.data_folder)

    def data(self) -> FederatedData:
        """Return the clients' data."""
        if "data" not in self._known:
            config = self.cell.federation.config(self.cell.scene)
            self._known["data"] = clients_of(self.cell.scene, config, self.data_folder)
        data: FederatedData = self._known["data"]
        return data

    def federated(self) -> Run:
        """Return the run of FedAvg, finished; an interrupted one goes on.

        Its federated values are kept beside it: they serve further ways of adapting, also by a later version whose
        settings no longer fit the run's folder.
        """
        if "run" not in self._known:
            cell = self.cell
            config = cell.federation.config(cell.scene)
            of = {"scene": cell.scene.settings(), "federation": asdict(cell.federation)}
            out = self.folder(f"{cell.scene.slug}-{cell.federation.slug}", of)
            final = out / "final.safetensors"
            if final.exists():
                model, method = build_model(config, self.data()), build_method(config.method)
                start = simulate(model, method, self.data(), rounds=0, seed=cell.scene.seed)
                run = replace(start, server=read_tensors(final), round=cell.federation.rounds)
            else:
                run = run_config(
                    config,
                    data=self.data(),
                    out=out,
                    resume=(out / "run.json").exists(),
                    progress=self.progress,
                    workers=self.workers,
                ).last
                write_tensors(final, run.server)
            self._known["run"] = run
        found: Run = self._known["run"]
        return found

    def balanced(self, found: Run) -> tuple[float, ...]:
        """Return each client's accuracy on official test images of all classes alike that nobody drew."""
        rows, images = self.unused()
        if not len(rows):
            return ()
        run = found
        run.net.train(False)
        label = torch.from_numpy(images.labels[rows])
        out = []
        for client in found.clients:
            params = {**run.server, **found.own(client)}
            right = 0
            with torch.no_grad():
                for start in range(0, len(rows), 500):
                    part = rows[start : start + 500]
                    logits = run.method.predict(
                        run.net, params, {"image": torch.from_numpy(images.images[part])}
                    )
                    right += int((logits.argmax(1) == label[start : start + 500]).sum())
            out.append(right / len(rows))
        return tuple(out)

    def unused(self) -> tuple[np.ndarray, ImageSet]:
        """Return the numbers of these images, ``SHOWN`` of a class or as many as the scarcest class has left."""
        if "unused" not in self._known:
            config = self.cell.federation.config(self.cell.scene)
            images = read_source(config.data, config.seed, self.data_folder)
            assert isinstance(images, ImageSet)
            free = np.ones(len(images), bool)
            free[: images.train] = False
            free[np.asarray(self.data().columns["_image"])] = False
            order = numpy_generator(self.cell.scene.seed, "balanced").permutation(np.flatnonzero(free))
            own = [order[images.labels[order] == c] for c in range(images.classes)]
            size = min(SHOWN, *(len(rows) for rows in own))
            self._known["unused"] = (np.concatenate([rows[:size] for rows in own]), images)
        rows, images = self._known["unused"]
        return rows, images


def _of_all(scene: Scene) -> Scene:
    """Return the scene as it is where nobody opts out."""
    return replace(scene, q=0.0, by="client")


def _keep(found: Run, file: Path) -> None:
    numbered = list(zip(found.clients.positions.tolist(), found.clients, strict=True))
    tensors = {f"{number}/{n}": v for number, c in numbered for n, v in found.own(c).items()}
    stopped = {f"{number}//stopped": torch.tensor(found.stopped[c]) for number, c in numbered}
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")  # cells side by side may share the file
    write_tensors(part, {**tensors, **stopped})
    os.replace(part, file)


def _loaded(run: Run, file: Path) -> Run:
    experts: dict[int, Params] = {}
    for key, value in read_tensors(file).items():
        client, _, name = key.partition("/")
        experts.setdefault(int(client), {})[name] = value
    stopped = {c: tuple(own.pop("/stopped").tolist()) for c, own in sorted(experts.items())}
    found = replace(run, clients=SomeIds(run.data.ids, np.array(list(stopped), np.int64)))
    found.fitted = dict(zip(found.clients, (experts[number] for number in stopped), strict=True))
    found.stopped = dict(zip(found.clients, stopped.values(), strict=True))
    return found


@dataclass(frozen=True)
class CellJob:
    """Computes some variants of a cell.

    Attributes:
        cell: the cell.
        variants: of it.
        data, results, runs: folders, as ``Work``'s.
    """

    cell: Cell
    variants: Sequence[Variant]
    data: Path | None
    results: Path
    runs: Path

    @property
    def name(self) -> str:
        """The run's name, which all variants of a task share."""
        return self.cell.name(self.variants[0])

    def __call__(self, *, alone: bool = True, progress: bool | None = None) -> None:
        """Compute what is missing; see ``places.LongJob``."""
        Work(self.cell, self.data, self.results, self.runs, None if alone else 1, progress).run(self.variants)


def run_cells(
    cells: Sequence[tuple[Cell, Sequence[Variant]]],
    data: Path | None,
    results: Path,
    runs: Path,
    workers: int = 1,
    progress: bool | None = None,
    wants: Callable[[str], bool] = lambda _: True,
    on: Place | None = None,
) -> None:
    """Compute what is missing of all cells, as ``run_long_jobs`` does.

    Local training comes first, as cells share it. ``wants`` tells by a run's name whether it is to be computed.

    Raises:
        FedkeepError: of the first cell that failed; those that finished are kept.
    """

    def slot_of(cell: Cell, variant: Variant) -> Slot[Result]:
        return cell.slot(results, variant, source_of(cell.scene, data))

    alone: dict[Path, tuple[Cell, list[Variant]]] = {}
    for cell, variants in cells:
        for variant in variants:
            if not variant.needs_federation:
                key = cell.file(results, variant)
                alone.setdefault(key, (replace(cell, scene=_of_all(cell.scene)), []))[1].append(variant)
    rest = [(cell, [v for v in variants if v.needs_federation]) for cell, variants in cells]
    for wave in (list(alone.values()), rest):
        missing = [
            CellJob(cell, todo, data, results, runs)
            for cell, variants in wave
            if (
                todo := [
                    v
                    for v in dict.fromkeys(variants)
                    if wants(cell.name(v)) and slot_of(cell, v).read() is None
                ]
            )
        ]
        run_long_jobs(missing, workers, progress, on=on)
