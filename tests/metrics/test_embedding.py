import math
import sys

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.metrics import chance_agreement, knn_agreement, knn_r2, linear_cka, silhouette, tsne, user_map
from fedkeep.metrics import embedding as room
from tests.refusals import raises


@pytest.fixture
def clusters() -> tuple[np.ndarray, list[str]]:
    random = np.random.default_rng(3)
    centres = random.normal(size=(3, 5)) * 4
    codes = random.integers(0, 3, 90)
    return centres[codes] + random.normal(size=(90, 5)) * 2, [f"t{c}" for c in codes]


def test_knn_agreement_by_hand() -> None:
    # on a line: a at 0 and 1, b at 3 and 10. Nearest: 0->1 a, 1->0 a, 3->1 a (wrong), 10->3 b
    line = torch.tensor([[0.0], [1.0], [3.0], [10.0]])
    assert knn_agreement(line, ["a", "a", "b", "b"], k=1) == 0.75
    # two nearest: 0->(1,3) 1/2; 1->(0,3) 1/2; 3->(1,0) 0; 10->(3,1) 1/2
    assert knn_agreement(line, ["a", "a", "b", "b"], k=2) == 0.375


def test_equal_vectors_give_chance_in_any_order() -> None:
    traits = ["a", "a", "a", "b", "b"]
    assert chance_agreement(traits) == pytest.approx((3 * 2 + 2 * 1) / 20)
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2]):
        got = knn_agreement(np.zeros((5, 3)), [traits[i] for i in order], k=2)
        assert got == pytest.approx(chance_agreement(traits))


def test_knn_agreement_equals_scikit_learn(
    clusters: tuple[np.ndarray, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.neighbors import NearestNeighbors

    monkeypatch.setattr(room, "_CHUNK", 7)  # several chunks, the last one short
    vectors, traits = clusters
    near = NearestNeighbors(n_neighbors=11).fit(vectors).kneighbors(return_distance=False, n_neighbors=10)
    names = np.array(traits)
    wanted = (names[near] == names[:, None]).mean()
    assert knn_agreement(vectors, traits) == pytest.approx(wanted, abs=1e-12)
    assert wanted > chance_agreement(traits) + 0.1


def test_k_is_lowered_to_the_number_of_others() -> None:
    assert knn_agreement(np.array([[0.0], [1.0], [5.0]]), [1, 1, 2], k=10) == pytest.approx((1 + 1 + 0) / 6)
    assert math.isnan(knn_agreement(np.zeros((1, 2)), ["a"]))
    assert math.isnan(chance_agreement(["a"]))


def test_knn_r2_by_hand() -> None:
    line = np.array([[0.0], [1.0], [10.0], [11.0]])
    # the nearest other's trait: 1, 0, 4, 3 for 0, 1, 3, 4; mean 2, SST = 4+1+1+4, SSE = 4
    assert knn_r2(line, [0.0, 1.0, 3.0, 4.0], k=1) == pytest.approx(1 - 4 / 10)
    assert math.isnan(knn_r2(line, [2.0] * 4))


def test_silhouette_by_hand() -> None:
    # 0,1 in a; 4 in b alone: a's s = (4-1)/4 and (3-1)/3; the lone one counts 0
    got = silhouette(np.array([[0.0], [1.0], [4.0]]), ["a", "a", "b"])
    assert got == pytest.approx((3 / 4 + 2 / 3 + 0) / 3)


def test_silhouette_equals_scikit_learn(
    clusters: tuple[np.ndarray, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.metrics import silhouette_score

    monkeypatch.setattr(room, "_CHUNK", 8)
    vectors, traits = clusters
    assert silhouette(vectors, traits) == pytest.approx(silhouette_score(vectors, traits), abs=1e-10)


def test_silhouette_of_one_trait_is_nan_and_of_equal_vectors_zero() -> None:
    assert math.isnan(silhouette(np.zeros((3, 1)), ["a"] * 3))
    assert silhouette(np.zeros((4, 1)), ["a", "a", "b", "b"]) == 0.0


def test_linear_cka_by_hand_and_invariance() -> None:
    random = np.random.default_rng(0)
    a = random.normal(size=(40, 6))
    rotation, _ = np.linalg.qr(random.normal(size=(6, 6)))
    assert linear_cka(a, 3 * a @ rotation + 5) == pytest.approx(1.0)
    b = random.normal(size=(40, 3))
    # for one column each, CKA is the squared correlation
    wanted = np.corrcoef(a[:, 0], b[:, 0])[0, 1] ** 2
    assert linear_cka(a[:, :1], b[:, :1]) == pytest.approx(wanted)
    # the reference in its kernel form: tr(KHLH) / sqrt(tr(KHKH) tr(LHLH))
    h = np.eye(40) - 1 / 40
    k, m = h @ a @ a.T @ h, h @ b @ b.T @ h
    assert linear_cka(a, b) == pytest.approx(np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m)))
    assert math.isnan(linear_cka(a, np.ones((40, 2))))


def test_traits_may_be_a_tensor(clusters: tuple[np.ndarray, list[str]]) -> None:
    """Each element of a tensor was a trait of its own, and all numbers were 0."""
    vectors, names = clusters
    codes = [sorted(set(names)).index(name) for name in names]
    for traits in (torch.tensor(codes), list(torch.tensor(codes)), np.array(codes)):
        assert silhouette(vectors, traits) == silhouette(vectors, names) > 0
        assert knn_agreement(vectors, traits) == knn_agreement(vectors, names) > 0
        assert chance_agreement(traits) == chance_agreement(names) > 0
    assert knn_r2(vectors, torch.tensor(codes).bfloat16()) == knn_r2(vectors, codes)
    half = torch.from_numpy(vectors).bfloat16()
    assert silhouette(half, names) == silhouette(half.float(), names)


@pytest.mark.parametrize("unknown", [math.nan, np.float32("nan"), torch.tensor(math.nan)])
def test_a_trait_that_is_not_known_is_no_trait(unknown: object) -> None:
    traits = ["a", unknown, None, None]
    for measured in (lambda: silhouette(np.zeros((4, 1)), traits), lambda: chance_agreement(traits)):
        with pytest.raises(DataError, match=r"^Traits: one is NaN\. Leave"):
            measured()
    assert chance_agreement(["a", "a", None, None]) == pytest.approx(1 / 3)


def test_rows_must_fit() -> None:
    with pytest.raises(DataError, match=r"^User vectors: wanted shape.*3.*4.*2"):
        linear_cka(np.zeros((4, 2)), np.zeros((3, 2)))
    with pytest.raises(DataError, match="a value is NaN or infinite"):
        silhouette(np.array([[math.nan], [0.0]]), ["a", "b"])
    with pytest.raises(DataError, match=r"^k must be at least 1; got 0\.$"):
        knn_agreement(np.zeros((3, 1)), ["a"] * 3, k=0)


def test_tsne_keeps_clusters_apart_and_repeats(clusters: tuple[np.ndarray, list[str]]) -> None:
    vectors, traits = clusters
    first, second = tsne(vectors, seed=1), tsne(torch.from_numpy(vectors), seed=1)
    assert first.points.shape == (90, 2)
    assert np.array_equal(first.points, second.points)
    assert knn_agreement(first.points, traits) > chance_agreement(traits) + 0.1
    assert first.note == (
        "t-SNE, perplexity 29.6667, PCA initialisation, seed 1 (perplexity lowered from 30: only 90 users)"
    )


def test_without_scikit_learn_a_map_shows_principal_components(
    clusters: tuple[np.ndarray, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = clusters[0]
    assert user_map(vectors, seed=1).note == tsne(vectors, seed=1).note
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "sklearn.manifold", raising=False)
    found = user_map(vectors)
    assert found.note == "principal components (for t-SNE install scikit-learn)"
    centred = torch.from_numpy(vectors - vectors.mean(0)).double()
    _, _, v = torch.pca_lowrank(centred, q=min(centred.shape), center=False)
    wanted = (centred @ v[:, :2]).abs().numpy()
    np.testing.assert_allclose(np.abs(found.points), wanted, atol=1e-8)
    with raises(ConfigError, who="t-SNE", package="scikit-learn"):
        tsne(vectors)


def test_tsne_of_few_or_equal_users() -> None:
    few = tsne(np.array([[0.0, 0.0], [3.0, 4.0]]))
    assert abs(few.points[0, 0] - few.points[1, 0]) == pytest.approx(5.0)
    assert few.note == "principal components: too few different users for t-SNE"
    assert not tsne(np.ones((20, 4))).points.any()
    assert tsne(np.zeros((0, 4))).points.shape == (0, 2)
    assert np.isfinite(tsne(np.arange(12.0)[:, None]).points).all()  # one dimension
    with pytest.raises(DataError, match="must be positive"):
        tsne(np.zeros((5, 2)), perplexity=0)
