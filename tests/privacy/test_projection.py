"""Projection of an embedding on its principal components: numbers by hand, invariants, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.params import Params
from fedkeep.privacy import Projection, RunDraw
from tests.refusals import raises

DRAW = RunDraw(torch.Generator())


def encoded(link: Projection, tensors: Params, start: Params) -> Params:
    return link.encode(tensors, start, DRAW, {}, {}).tensors


def table(rows: int = 30, width: int = 5, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    spread = torch.arange(width, 0, -1, dtype=torch.float64)
    return torch.randn(rows, width, generator=draw, dtype=torch.float64) * spread + 0.5


def through(link: Projection, change: Tensor, start: Tensor) -> Tensor:
    received = {"embedding.weight": start}
    sent = encoded(link, {"embedding.weight": change}, received)
    assert set(sent) == {"embedding.weight/projected", "embedding.weight/basis"}
    found = link.decode(sent, received, {})
    assert set(found) == {"embedding.weight"}
    return found["embedding.weight"]


def test_by_hand() -> None:
    """Rows (±3, ±4)·t + (10, 0): the first component is (0.6, 0.8), the second (0.8, −0.6) with its sign turned.

    W v_1 = 5 t + 6; W v_2 = 8 for every row, which is the mean's part alone.
    """
    t = torch.tensor([[-1.0], [0.0], [1.0]], dtype=torch.float64)
    w = t * torch.tensor([3.0, 4.0]) + torch.tensor([10.0, 0.0])
    first, second = Projection(1, 1), Projection(2, 2)
    torch.testing.assert_close(first.basis(w), torch.tensor([[0.6], [0.8]]).double())
    torch.testing.assert_close(second.basis(w), torch.tensor([[0.8], [-0.6]]).double())
    sent = encoded(first, {"embedding.weight": w}, {"embedding.weight": 0 * w})
    torch.testing.assert_close(sent["embedding.weight/projected"], 5 * t + 6)
    back = first.decode(sent, {"embedding.weight": 0 * w}, {})["embedding.weight"]
    torch.testing.assert_close(back, (5 * t + 6) @ torch.tensor([[0.6, 0.8]]).double())


def test_uncentred_components_keep_the_energy_of_their_singular_values() -> None:
    w = table()
    values = np.linalg.svd(w.numpy(), compute_uv=False) ** 2
    for start, end in ((1, 2), (2, 4), (3, 3), (1, 5)):
        link = Projection(start, end, center=False)
        kept = float((w @ link.basis(w)).square().sum() / w.square().sum())
        assert kept == pytest.approx(values[start - 1 : end].sum() / values.sum(), rel=1e-12)


@pytest.mark.parametrize("target", ["matrix", "delta"])
@pytest.mark.parametrize("center", [True, False])
def test_all_components_lose_nothing(target: str, center: bool) -> None:
    change, start = 0.1 * table(seed=1), table()
    link = Projection(1, 5, target=target, center=center)  # type: ignore[arg-type]
    torch.testing.assert_close(through(link, change, start), change, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        through(link, change[:2], start[:2]), change[:2], rtol=0, atol=1e-13
    )  # fewer rows than d
    narrow = through(link, change.float(), start.float())
    torch.testing.assert_close(narrow, change.float(), rtol=0, atol=2e-5)


def test_the_matrix_is_what_is_projected_or_the_change() -> None:
    change, start = 0.1 * table(seed=1), table()
    for target, whole in (("matrix", start + change), ("delta", change)):
        link = Projection(2, 4, target=target)  # type: ignore[arg-type]
        _, _, right = np.linalg.svd((whole - whole.mean(0)).numpy())
        v = torch.from_numpy(right[1:4].T.copy())
        kept = whole @ v @ v.T
        torch.testing.assert_close(through(link, change, start), kept - start if target == "matrix" else kept)
    twice = through(Projection(2, 4), through(Projection(2, 4), change, start), start)
    once = through(Projection(2, 4), change, start)
    assert not torch.allclose(
        twice, once, atol=0.1
    )  # a new first component is dropped: errors add up over rounds


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (2, 3), (3, 7), (7, 3), (50, 20)])
def test_a_table_is_restored_alike_whether_it_came_over_a_wire_or_not(rows: int, width: int) -> None:
    start = {"embedding.weight": torch.randn(rows, width, generator=torch.Generator().manual_seed(width))}
    zeros = {"embedding.weight": torch.zeros(rows, width)}
    link = Projection(2, width)
    sent = encoded(link, zeros, start)
    packed = {
        name: value.contiguous().clone() for name, value in sent.items()
    }  # rows one after another, as in files
    here, there = link.decode(sent, start, {}), link.decode(packed, start, {})
    assert torch.equal(here["embedding.weight"], there["embedding.weight"])


def test_the_basis_is_orthonormal_and_its_signs_are_fixed() -> None:
    w = table()
    for link in (Projection(1, 5), Projection(2, 3, center=False)):
        basis = link.basis(w)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(basis.shape[1]).double())
        assert bool((basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all())
        torch.testing.assert_close(link.basis(-w), basis)
        torch.testing.assert_close(link.basis(w.flip(0)), basis)
        assert link.basis(w.float()).dtype == torch.float32


def test_other_tensors_pass_untouched_and_sizes_are_right() -> None:
    start = {"embedding.weight": torch.zeros(40, 6), "other.weight": torch.zeros(3), "n": torch.tensor(2)}
    change = {"embedding.weight": torch.randn(40, 6), "other.weight": torch.ones(3), "n": torch.tensor(3)}
    link = Projection(2, 4)
    sent = encoded(link, change, start)
    assert {n: tuple(v.shape) for n, v in sent.items()} == {
        "embedding.weight/projected": (40, 3),
        "embedding.weight/basis": (6, 3),
        "other.weight": (3,),
        "n": (),
    }
    back = link.decode(sent, start, {})
    assert list(back) == list(change)
    assert back["other.weight"] is change["other.weight"]
    both = encoded(
        Projection(1, 2, "*.weight"),
        {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(5, 2)},
        {"a.weight": torch.zeros(4, 3), "b.weight": torch.zeros(5, 2)},
    )
    assert sorted(both) == ["a.weight/basis", "a.weight/projected", "b.weight/basis", "b.weight/projected"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 3, "end": 2}, "counted from 1, with start at most end; got start=3 and end=2."),
        ({"start": 0, "end": 2}, "counted from 1, with start at most end; got start=0 and end=2."),
        ({"target": "w"}, "target must be 'matrix' or 'delta'; got 'w'."),
    ],
)
def test_options_that_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Projection(**options)  # type: ignore[arg-type]
    assert str(error.value).endswith(message)


def test_tables_that_do_not_fit_are_refused() -> None:
    with raises(ConfigError, got=(30, 5), start=2, end=6):
        through(Projection(2, 6), table(), table())
    with pytest.raises(ConfigError, match=r"got \(30,\)"):
        through(Projection(1, 1), table()[:, 0], table()[:, 0])
    with pytest.raises(ConfigError) as error:
        encoded(Projection(1, 2, "embeding.weight"), {"embedding.weight": table()}, {})
    assert error.value.facts["table"] == "embeding.weight"
    assert "embedding.weight" in error.value.facts["near"]


def test_uploads_that_do_not_fit_are_refused() -> None:
    link, received = Projection(1, 2), {"embedding.weight": table()}
    sent = encoded(link, {"embedding.weight": table()}, received)
    for name in sent:
        with pytest.raises(UploadError, match=f"^'{name}' is missing$"):
            link.decode({n: v for n, v in sent.items() if n != name}, received, {})
    for ending, shape, came in (
        ("projected", (30, 3), "(30, 3) and (5, 2)"),
        ("basis", (5, 1), "(30, 2) and (5, 1)"),
    ):
        wrong: Params = {**sent, f"embedding.weight/{ending}": torch.zeros(shape)}
        with pytest.raises(UploadError) as error:
            link.decode(wrong, received, {})
        wanted = "'embedding.weight' should come as (30, 2) and (5, 2)"
        assert str(error.value) == f"{wanted}, came as {came}"


def test_uploads_are_a_quarter_smaller() -> None:
    """|V|·d → |V|·d' + d·d': 10.00 M → 7.48 M numbers at (2, 150), 7.53 M at (1, 150) (KTEPS §4.2)."""
    for start, millions in ((2, 7.48), (1, 7.53)):
        kept = 150 - start + 1
        assert math.isclose((50_000 * kept + 200 * kept) / 1e6, millions, abs_tol=0.005)
