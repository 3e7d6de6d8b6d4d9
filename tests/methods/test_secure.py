"""Methods by secure sums: what they make equals plain sums to the fixed-point step, with drop-outs; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Method, Phase, Split, WeightedMean, averaging, declare, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, SecureSumError, UploadError
from fedkeep.data import FederatedData
from fedkeep.methods import Global, SecureMean, SecureSums, securely
from fedkeep.methods.secure import Vectors
from fedkeep.privacy import Chain, GaussianNoise, QuantileClip, TopK
from fedkeep.split import Upload
from tests.methods.table import ROWS
from tests.refusals import raises
from tests.tiny import Logits, Rounds, classes, everyone, job, same_bits

UNIFORM = averaging(by="uniform")
LOOSE = SecureSums(clip=100.0, bits=64)
START = {
    "w": torch.zeros(2, dtype=torch.float64),
    "t": torch.zeros(4, 1, dtype=torch.float64),
    "n": torch.tensor(3),
}


def upload(w: list[float], row: int, value: float, weight: float = 1.0) -> Upload:
    rows = {"t": torch.tensor([row])}
    start = {"w": START["w"], "t": START["t"][rows["t"]], "n": START["n"]}
    trained = {"w": torch.tensor(w).double(), "t": torch.tensor([[value]]).double(), "n": torch.tensor(9)}
    return Split().upload(start, trained, weight, rows)


def summed(uploads: dict[str, Upload], cohort: str, **options: Any) -> Any:
    rule = SecureMean(mean=WeightedMean(), sums=SecureSums(**{"clip": 1.0, **options}))
    found = rule.begin(Global(params=START), START, cohort)
    for client in cohort:
        found.add(client, uploads[client]) if client in uploads else found.skip(client)
    return found


def test_a_round_by_hand_with_a_drop_out() -> None:
    """Weights 1 of 4 and 3 of 4; ‖(3, 0, 4)‖ = 5 is cut to 1: (¼ (0.6, 0, 0.8) + ¾ (0, 0.5, 0.5)) / 1; c drops out."""
    uploads = {"a": upload([3.0, 0.0], 2, 4.0, 1.0), "b": upload([0.0, 0.5], 0, 0.5, 3.0)}
    found = summed(uploads, "abc", heaviest=4.0)
    step = found.ring.step
    made = found.value()
    torch.testing.assert_close(made.changes["w"], torch.tensor([0.15, 0.375]).double(), rtol=0, atol=3 * step)
    torch.testing.assert_close(
        made.changes["t"].flatten(), torch.tensor([0.375, 0, 0.2, 0]).double(), rtol=0, atol=3 * step
    )
    assert made.changes["n"] == 3
    assert (made.rows, made.count) == ({}, 2)
    assert made.weight == pytest.approx(4.0, abs=1e-6)
    assert found.held_bytes == 0


def test_a_weight_above_the_heaviest_counts_as_one() -> None:
    """Of a million examples and of the heaviest's four: half each; a number out of range would be refused."""
    uploads = {"a": upload([1.0, 0.0], 0, 0.0, 1e6), "b": upload([0.0, 0.5], 0, 0.0, 4.0)}
    found = summed(uploads, "ab", heaviest=4.0)
    made = found.value()
    wanted = torch.tensor([0.5, 0.25]).double()
    torch.testing.assert_close(made.changes["w"], wanted, rtol=0, atol=3 * found.ring.step)
    assert made.weight == pytest.approx(8.0, abs=1e-6)


def test_which_rows_a_client_holds_leaves_no_trace_but_in_the_sum() -> None:
    """All send all rows: vectors are as long whoever holds what, and masked they are all different."""
    seen = [summed({"a": upload([0.1, 0.2], row, 0.5)}, "ab") for row in (0, 3)]
    assert [each.size for each in seen] == [2 + 4 + 1] * 2
    lengths = {len(each.vector(upload([0.1, 0.2], 1, 0.5))) for each in seen}
    assert lengths == {7}


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.user = nn.Embedding(300, 2), nn.Parameter(torch.zeros(2))
        declare(self, lookup={"table.weight": "word"})

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.table(word) + self.user


@pytest.mark.parametrize("bits", [32, 64])
def test_the_traffic_is_that_of_masked_vectors(bits: Literal[32, 64]) -> None:
    """Masked: 600 numbers of the table and the weight; sent: the whole table of float32. Else rows, and their numbers."""
    data = FederatedData.from_columns(
        np.repeat([0, 1], 4),
        {"word": np.array([0, 1, 2, 3] * 2), "label": np.arange(8) % 2},
        ["train", "train", "valid", "test"] * 2,
    )
    plain = methods.furl("user", server=UNIFORM).on_client(tables="local")
    found = []
    for method in (plain, securely(plain, SecureSums(clip=1.0, bits=bits))):
        history = simulate(Words(), method, data, rounds=1, cohort=2).history
        found.append({r.metric: (r.value, r.n) for r in history if r.split == "traffic"})
    assert found[0] == {"upload_bytes": (2 * (2 * 4 + 8), 2), "download_bytes": (2 * 2 * 4, 2)}
    assert found[1] == {"upload_bytes": (601 * bits // 8, 2), "download_bytes": (600 * 4, 2)}


def test_fewer_than_the_threshold_are_no_sum() -> None:
    uploads = {c: upload([0.1, 0.0], 0, 0.0) for c in "abcdef"}
    assert summed({c: uploads[c] for c in "abcd"}, "abcdef").value().count == 4
    with pytest.raises(SecureSumError, match="The server has vectors: 3 clients, and the threshold is 4."):
        summed({c: uploads[c] for c in "abc"}, "abcdef").value()
    with pytest.raises(SecureSumError, match="1 clients, and the threshold is 2"):
        summed({"a": uploads["a"]}, "a").value()
    with pytest.raises(UploadError):  # no weight is positive
        summed({c: upload([0.1, 0.0], 0, 0.0, 0.0) for c in "ab"}, "ab").value()
    with pytest.raises(SecureSumError, match="partial sums of it can't be merged"):
        summed({}, "ab").merge(summed({}, "ab"))


SUMS = [
    "fedavg",
    "furl",
    "fedrep",
    "kteps",
    "fedproto",
    "mixture",
    "fedrecon",
    "mr_mtl",
    "feddbe",
]


@pytest.mark.parametrize("name", [n for n in SUMS if n in ROWS])
def test_a_method_makes_what_it_made(name: str) -> None:
    build, method = ROWS[name]
    even = method.on_server(reduce=WeightedMean(by="uniform"))
    made = [
        Rounds(job(each.made_for(build()).double(), each, classes()))
        for each in (even, securely(even, LOOSE))
    ]
    for rounds in made:
        for _ in range(2):
            rounds(range(6))
    plain, same = ({**r.server.params, **r.server.state} for r in made)
    for n, value in plain.items():
        if value.is_floating_point():
            torch.testing.assert_close(same[n], value, rtol=1e-9, atol=1e-12, msg=n)


def test_a_run_repeats_bit_for_bit_though_masks_are_new() -> None:
    method = securely(
        methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1)), server=UNIFORM),
        SecureSums(clip=0.5),
    )

    def run() -> Any:
        return simulate(Logits().double(), method, classes(), rounds=3, cohort=4)

    first, second = run(), run()
    assert same_bits(first.server, second.server)
    assert same_bits(everyone(first.private, 6), everyone(second.private, 6))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (ROWS["ifca"][1], "'ifca' reduces uploads by MeanByGroup, which looks at single uploads"),
        (ROWS["fedamp"][1], "'fedamp' reduces uploads by KeepEach, which looks at single uploads"),
        (ROWS["fedpac"][1], "'fedpac' reduces uploads by GatherHeads, which looks at single uploads"),
        (
            ROWS["scaffold"][1],
            (
                "'scaffold' cannot have its uploads clipped: the server's control is the mean of what clients keep, which "
                "would part for good. Secure sums want clipping. Take another method."
            ),
        ),
        (
            ROWS["feddyn"][1],
            "'feddyn' cannot have its uploads clipped: the server's h is the mean of the slopes",
        ),
        (
            methods.fedavg(server=averaging().but(reduce=methods.Median())),
            "'fedavg' reduces uploads by Median",
        ),
        (methods.fedavg(server=averaging().but(reduce=methods.Krum())), "'fedavg' reduces uploads by Krum"),
        (
            methods.fedavg(server=averaging().but(reduce=methods.TrimmedMean())),
            "'fedavg' reduces uploads by Trimmed",
        ),
        (
            methods.fedavg(server=averaging().but(reduce=methods.ClippedMean())),
            "'fedavg' reduces uploads by ClippedM",
        ),
        (methods.fedavg(), "'fedavg' weights clients by their numbers of examples, which have no bound"),
        (
            methods.fedavg(
                server=averaging().but(reduce=WeightedMean(by="uniform", missing_rows="owners_only"))
            ),
            "'fedavg' divides each row by the weights of those who hold it, which secure sums hide.",
        ),
        (
            methods.furl("user", private_scale="fedavg", server=UNIFORM),
            "'furl' scales what a client keeps by its",
        ),
        (
            methods.fedavg(server=UNIFORM).but(upload=(TopK(),)),
            "The link TopK of 'fedavg' has the server decode",
        ),
        (
            methods.fedavg(server=UNIFORM).but(upload=(QuantileClip(),)),
            "The link QuantileClip of 'fedavg' has the",
        ),
        (
            methods.kteps_star(server=UNIFORM),
            "The link Projection of 'kteps_star' has the server decode each upload",
        ),
    ],
)
def test_what_looks_at_single_uploads_is_refused(method: Method, message: str) -> None:
    with pytest.raises(MethodError) as error:
        securely(method, LOOSE)
    assert str(error.value).startswith(message)


def test_a_method_that_sends_nothing_has_no_secure_sum() -> None:
    nothing = securely(methods.local().on_server(reduce=WeightedMean(by="uniform")), LOOSE)
    with raises(ConfigError, said="Nothing is federated, so nothing leaves the"):
        simulate(Logits(), nothing, classes(), rounds=1, cohort=3, evaluate_every=0)


def test_noise_of_the_clients_own_goes_with_secure_sums() -> None:
    method = methods.fedavg(server=UNIFORM).but(upload=(GaussianNoise(0.1),))
    assert securely(method, LOOSE).chain() == Chain((GaussianNoise(0.1),))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_uploads_in_half_precision_are_within_the_bound(kind: torch.dtype) -> None:
    start = {"w": torch.zeros(1, dtype=kind), "t": torch.zeros(4, 1, dtype=kind)}
    rows = {"t": torch.tensor([2])}
    for clip in (3e-4, 7e-4, 1e-3, 3e-3):
        vectors = Vectors(SecureSums(clip=clip), start, 2)
        one = Split().upload({"w": start["w"]}, {"w": torch.full((1,), 0.37).to(kind)}, 1.0)
        made = vectors.ring.decode(Vectors(SecureSums(clip=clip), {"w": start["w"]}, 2).vector(one))
        assert made[0] == pytest.approx(clip, abs=vectors.ring.step)
        trained = {"w": torch.full((1,), 0.3).to(kind), "t": torch.full((1, 1), 0.4).to(kind)}
        two = Split().upload({"w": start["w"], "t": start["t"][rows["t"]]}, trained, 1.0, rows)
        spread = vectors.ring.decode(vectors.vector(two))[:-1]  # a table first: names in their order
        assert np.linalg.norm(spread) == pytest.approx(clip, rel=1e-5)
        assert spread[[0, 1, 3]].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("cohort", "sampling"), [(5, "shuffled"), (1, "independent"), (3, "poisson")])
def test_a_simulation_with_a_cohort_of_one_is_refused_before_it_begins(
    cohort: int, sampling: Any, tmp_path: Path
) -> None:
    method = securely(methods.furl("user", server=UNIFORM), LOOSE)
    with pytest.raises(ConfigError, match="Secure sums want at least 2.*6"):
        simulate(
            Logits(), method, classes(), rounds=12, cohort=cohort, sampling=sampling, out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
