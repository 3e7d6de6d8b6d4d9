"""Cells of the mixture of experts' tables: shared work gives the same bits, and nothing is computed twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments.environment import commit
from fedkeep.experiments.personalize import adapt_clients, rooted
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.cells import Finished
from fedkeep_papers.moe.cells import Work, run_cells
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import Adapting, Federation, Scene, _source, source_of
from fedkeep_papers.moe.variants import (
    AUGMENTED,
    FEDAVG,
    LOCAL,
    MIXTURE,
    OTHERS,
    PAPER,
    TUNED,
    Variant,
    adapting_method,
    mixture_model,
)
from tests.papers.moe.images import write_cifar, write_fashion
from tests.refusals import raises
from tests.tiny import same_bits

SCENE = Scene("fashion_mnist", 0.8, clients=5, train=10, valid=8, test=8)
SOURCE = {"images.gz": "ab"}
CELL = Cell(SCENE, Federation(2, 1), Adapting(3, 1, 2))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_fashion(folder / "fashion_mnist")
    return folder


@pytest.fixture(scope="module")
def work(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("cell")
    return Work(CELL, images, folder / "results", folder / "runs")


DECAYED = Variant("decayed, authors' mix", mix="logprob", gate="both", weight_decay=0.1)
EVERY = [*PAPER, *OTHERS, *AUGMENTED, DECAYED]


@pytest.mark.parametrize(
    "variant", [LOCAL, TUNED, MIXTURE, OTHERS[-1], AUGMENTED[-1], DECAYED], ids=lambda v: v.name
)
def test_shared_experts_change_no_bit(work: Work, variant: Variant) -> None:
    """Each variant alone, from the run of FedAvg, by its whole method."""
    method = adapting_method(variant, CELL.adapting)
    run = work.federated()
    if variant.kind == "mixture":
        alone = rooted(run, mixture_model(SCENE, variant, work.data()), method, "global_expert.")
    elif variant.kind == "fine_tuned":
        alone = rooted(run, run.net.module, method)
    else:
        alone = rooted(run, mixture_model(SCENE, variant, work.data()).get_submodule("local_expert"), method)
    expected, found = adapt_clients(alone), work.adapted(variant)
    assert len(found.clients) == 5
    for client in found.clients:
        assert same_bits(found.own(client), expected.own(client))
    assert found.stopped == expected.stopped
    assert all(
        all(stops) for stops in found.stopped.values()
    )  # step 2's pass is told, though it was not repeated
    result = work.compute(variant)
    assert list(result.valid) == expected.clients_frame("valid")["accuracy"].to_pylist()
    assert list(result.test) == expected.clients_frame("test")["accuracy"].to_pylist()


def test_every_variant_is_different(work: Work) -> None:
    settings = [json.dumps(CELL.settings(v)) for v in EVERY]
    assert len(set(settings)) == len(EVERY)
    firsts = {v.name: v.first.kind for v in EVERY if v.kind == "mixture"}
    assert {name for name, kind in firsts.items() if kind == "fine_tuned"} == {
        v.name for v in EVERY if v.local_init == "finetuned"
    }


def test_the_global_expert_of_a_mixture_starts_as_fedavg(work: Work) -> None:
    from fedkeep.experiments.build import build_model

    plain = build_model(CELL.federation.config(SCENE), work.data())
    mixed = mixture_model(SCENE, MIXTURE, work.data())
    assert same_bits(plain.state_dict(), mixed.get_submodule("global_expert").state_dict())
    assert not same_bits(plain.state_dict(), mixed.get_submodule("local_expert").state_dict())


def test_balanced_images_are_nobodys_and_of_all_classes_alike(work: Work) -> None:
    rows, source = work.unused()
    used = set(np.asarray(work.data().columns["_image"]).tolist())
    assert not used & set(rows.tolist())
    assert rows.min() >= source.train
    counts = np.bincount(source.labels[rows], minlength=10)
    assert len(set(counts.tolist())) == 1
    assert counts[0] > 0
    result = work.compute(LOCAL)
    assert len(result.balanced) == 5
    everything = Work(
        replace(CELL, scene=replace(SCENE, valid=0, test=60, p=1.0)),
        work.data_folder,
        work.results,
        work.runs,
    )
    assert everything.unused()[0].tolist() == []
    assert everything.balanced(everything.adapted(FEDAVG)) == ()


def test_a_cell_is_computed_once_and_goes_on_where_it_stopped(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    real = Work.compute

    def counted(self: Work, variant: Variant) -> Result:
        if variant.kind == "mixture" and "stop" not in computed:
            computed.append("stop")
            raise KeyboardInterrupt
        computed.append(f"{variant.name}, q = {self.cell.scene.q:g}")
        return real(self, variant)

    monkeypatch.setattr(Work, "compute", counted)
    cells = [(replace(CELL, scene=replace(SCENE, q=q)), PAPER) for q in (0.0, 0.5)]
    folders = (images, tmp_path / "results", tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        run_cells(cells, *folders)
    assert computed == ["Local, q = 0", "FedAvg, q = 0", "Fine-tuned, q = 0", "stop"]
    run_cells(cells, *folders)
    assert computed[4:] == ["Mixture, q = 0", "FedAvg, q = 0.5", "Fine-tuned, q = 0.5", "Mixture, q = 0.5"]
    run_cells(cells, *folders)
    assert len(computed) == 8
    results = [
        c.slot(tmp_path / "results", v, source_of(SCENE, images)).read()
        for c, variants in cells
        for v in variants
    ]
    assert all(r is not None and len(r.valid) == len(r.test) == 5 for r in results)
    assert results[1] == results[5]  # local training knows nothing of who opts out
    assert sorted(p.name for p in (tmp_path / "results").glob("*.json")) == [
        "fashion_mnist-n5-N10-p0.8-q0-s0-r2-e1-a3x1x2.json",
        "fashion_mnist-n5-N10-p0.8-q0.5-s0-r2-e1-a3x1x2.json",
        "fashion_mnist-n5-N10-p0.8-s0-a3x1x2-local.json",
    ]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_clients_without_images_to_judge_are_refused_before_training(
    images: Path, tmp_path: Path, split: str
) -> None:
    cell = replace(CELL, scene=replace(SCENE, **{split: 0}))
    with raises(ConfigError, count=5, counts=5, split=split):
        run_cells([(cell, PAPER)], images, tmp_path / "results", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_federated_values_outlive_the_runs_folder(images: Path, tmp_path: Path) -> None:
    """A later version may describe its settings otherwise, so that the run could not be resumed."""
    first = Work(CELL, images, tmp_path / "results", tmp_path / "runs")
    run = first.federated()
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "run.json").write_text("{}", encoding="utf-8")
    again = Work(CELL, images, tmp_path / "results", tmp_path / "runs")
    assert same_bits(again.federated().server, run.server)
    assert again.federated().round == 2
    one, two = first.compute(FEDAVG), again.compute(FEDAVG)
    assert (one.valid, one.test, one.balanced) == (two.valid, two.test, two.balanced)
    assert again.compute(TUNED).valid == first.compute(TUNED).valid


def test_other_images_are_trained_on_anew(tmp_path: Path) -> None:
    """FedAvg's model and the experts that ways share are of the images that are there now."""

    def tested(name: str) -> list[tuple[float, ...]]:
        work = Work(CELL, tmp_path, tmp_path / name, tmp_path / name)
        work.run([FEDAVG, LOCAL, TUNED])
        source = source_of(SCENE, tmp_path)
        found = [CELL.slot(tmp_path / name, v, source).read() for v in (FEDAVG, LOCAL, TUNED)]
        return [(*r.valid, *r.test, *r.balanced) for r in found if r is not None]

    write_fashion(tmp_path / "fashion_mnist")
    before = tested("one")
    shutil.rmtree(tmp_path / "fashion_mnist")
    write_fashion(tmp_path / "fashion_mnist", 280, 290)
    _source.cache_clear()
    assert tested("one") == tested("fresh") != before


def test_other_settings_are_not_taken_for_these(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result((0.5,), (0.25,), (), ((3, 4),), 1.5)
    CELL.slot(tmp_path, MIXTURE, SOURCE).write(result)
    CELL.slot(tmp_path, TUNED, SOURCE).write(replace(result, test=(0.75,)))
    assert CELL.slot(tmp_path, MIXTURE, SOURCE).read() == result
    assert CELL.slot(tmp_path, TUNED, SOURCE).read() == replace(result, test=(0.75,))
    assert result.mean("test") == 0.25
    assert np.isnan(result.mean("balanced"))
    for changed in (
        replace(CELL, scene=replace(SCENE, valid=11)),
        replace(CELL, federation=replace(CELL.federation, epochs=3)),
        replace(CELL, adapting=replace(CELL.adapting, learning_rate=1e-3)),
    ):
        assert changed.settings(MIXTURE) != CELL.settings(MIXTURE)
        assert changed.slot(tmp_path, MIXTURE, SOURCE).read() is None
    assert CELL.slot(tmp_path, replace(MIXTURE, mix="logprob"), SOURCE).read() is None
    assert CELL.slot(tmp_path, replace(MIXTURE, name="renamed"), SOURCE).read() == result
    assert CELL.slot(tmp_path, MIXTURE, {"images.gz": "cd"}).read() is None
    with monkeypatch.context() as patch:
        patch.setattr("fedkeep_papers.kit.cells.NUMERICS", NUMERICS + 1)
        assert CELL.slot(tmp_path, MIXTURE, SOURCE).read() is None
        old = Finished(result=result, numerics=NUMERICS, commit=commit() or "", seconds=1.5)
        assert CELL.slot(tmp_path, MIXTURE, SOURCE).find() == old
    CELL.slot(tmp_path, MIXTURE, SOURCE).write(replace(result, seconds=2.0))
    assert CELL.slot(tmp_path, MIXTURE, SOURCE).read() == replace(result, seconds=2.0)


@pytest.mark.parametrize("content", ["[", "[{}]", '{"a": 1}', "[3]"])
def test_damaged_results_are_named(content: str, tmp_path: Path) -> None:
    path = CELL.file(tmp_path, MIXTURE)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=r"r2-e1-a3x1x2\.json holds no"):
        CELL.slot(tmp_path, MIXTURE, SOURCE).read()


def test_names_say_what_is_not_the_papers() -> None:
    assert Federation().slug == "r1500"
    assert Federation(300, fraction=0.1, mu=0.01, server_momentum=0.9).slug == "r300-f0.1-mu0.01-sm0.9"
    assert Adapting().slug == ""
    assert Scene(p=1.0, q=0.5, seed=3).slug == "cifar10-n5-N500-p1-q0.5-s3"
    with pytest.raises(ConfigError, match=r"The scenes' data sets are .*; got 'cifar'"):
        Scene("cifar")


def test_federations_are_the_papers_or_say_otherwise() -> None:
    from fedkeep import adam, averaging, sgd
    from fedkeep.experiments.build import build_method

    plain = build_method(Federation().config(SCENE).method)
    (phase,) = plain.client.phases
    assert (phase.optimizer, phase.epochs, phase.batch_size) == (adam(1e-4), 3, 10)
    assert plain.server == averaging(sgd(1.0))
    config = Federation(mu=0.1, server_momentum=0.9, fraction=0.1).config(replace(SCENE, clients=50))
    other = build_method(config.method)
    assert (other.name, other.server) == ("fedprox", averaging(sgd(1 - 0.9, momentum=0.9)))
    assert (config.run.cohort, config.run.rounds, config.run.sampling) == (5, 1500, "independent")
    table = Scene("cifar100", 0.5, 0.9, clients=50, train=100, test=150).tables()
    assert table["partition"]["valid_from"] == "train"
    assert table["opt_out"] == {"fraction": 0.9}


@pytest.mark.slow
def test_cells_side_by_side_are_the_same(images: Path, tmp_path: Path) -> None:
    cells = [(replace(CELL, scene=replace(SCENE, q=q)), (FEDAVG, TUNED)) for q in (0.0, 0.5)]
    for workers in (1, 2):
        run_cells(cells, images, tmp_path / f"results{workers}", tmp_path / f"runs{workers}", workers)
    for cell, variants in cells:
        for variant in variants:
            one, two = (
                cell.slot(tmp_path / f"results{w}", variant, source_of(SCENE, images)).read() for w in (1, 2)
            )
            assert (one.valid, one.test, one.stopped) == (two.valid, two.test, two.stopped)


def test_a_scene_of_cifar100_reads_what_is_there(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar100", classes=100, train=500, test=200)
    scene = Scene("cifar100", 0.6, clients=50, train=4, valid=4, test=2)
    cell = Cell(scene, Federation(1, 1, fraction=0.1), Adapting(1, 1, 1))
    own = Work(cell, tmp_path, tmp_path / "results", tmp_path / "runs")
    data = own.data()
    assert max(np.asarray(data.columns["_image"])[data.split_rows("valid")]) < 500
    assert own.federated().method.name == "fedavg"
    assert {r.n for r in own.federated().history if r.metric == "upload_bytes"} == {5}
