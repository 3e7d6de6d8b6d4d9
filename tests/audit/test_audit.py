"""What an audit rests on: canaries, images, the allow list; and methods that let nothing out but what they declare."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd
from fedkeep.audit import audit
from fedkeep.audit.audit import patterns
from fedkeep.audit.bench import Bench, States, changed, items, same, still
from fedkeep.audit.canaries import small
from fedkeep.audit.canary_images import describe_image
from fedkeep.audit.findings import Allowed
from fedkeep.core.errors import ConfigError
from fedkeep.core.packet import Packet
from fedkeep.data import toy
from fedkeep.engines.tables import local_rows
from fedkeep.methods import SecureSums, securely
from fedkeep.methods.added_parts import OnCopy, PulledCopy
from fedkeep.methods.hook_declarations import Reveal, revealed, reveals
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.models import Linear
from fedkeep.privacy import GaussianNoise
from fedkeep.remote.node import told_counts
from fedkeep.report.text_tables import markdown_escape
from fedkeep.store import LedgerLines
from tests.audit import leaks
from tests.audit.leaks import Own, furl
from tests.engines.tables.test_tables import Words
from tests.methods.table import DATA, ROWS
from tests.tiny import classes, texts

# --- images

DRAW = np.random.default_rng(0)
CANARIES = DRAW.standard_normal((6, 8))
CANARIES = np.concatenate([CANARIES, [CANARIES[1] + CANARIES[2] - CANARIES[0]]])
MAP = DRAW.standard_normal((8, 4))


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (CANARIES.astype("f4"), "the values themselves"),
        (CANARIES.astype("f2"), "the values themselves, in half precision"),
        (CANARIES[:, ::-1], "the values themselves"),
        (torch.tensor(CANARIES).bfloat16().double().numpy(), "a copy, in bfloat16"),
        (np.round(CANARIES * 32) / 32, "a copy, in 8 bits"),
        (-3 * CANARIES, "-3 times the values"),
        (CANARIES - 5, "a copy"),
        (np.concatenate([np.ones((7, 9)), 5 + CANARIES], 1), "a copy"),
        (100 + 1e-4 * CANARIES, "0.0001 times the values, in the last bits"),
        (CANARIES.sum(1, keepdims=True), "the sum of the values"),
        (2 - np.linalg.norm(CANARIES, axis=1)[:, None], "the norm of the values"),
        ((CANARIES**2).sum(1)[:, None], "the squared norm of the values"),
        (CANARIES @ MAP, "a linear image"),
        (np.tanh(CANARIES @ MAP), ""),
        (1e6 + np.tanh(CANARIES @ MAP), "in the last bits"),
        (DRAW.standard_normal((7, 300)), ""),
        (np.ones((7, 3)), ""),
        (np.full((7, 3), np.nan), ""),
    ],
)
def test_an_image_is_described(left: np.ndarray, words: str) -> None:
    assert describe_image(CANARIES, np.asarray(left, np.float64)) == words


def test_a_report_is_printed_as_its_page_says_it() -> None:
    report = audit(Linear(4, 3), methods.furl("user"), toy(users=3, examples=8), rounds=1)
    lines = str(report).splitlines()
    assert lines[0] == "# What leaves a device: furl"
    (said,) = [line for line in lines if f"{len(report.sources)} things that must stay were changed" in line]
    assert said.startswith("Nothing leaves undeclared. ")
    rows = [line for line in lines if " float32 " in line or " float64 " in line or "| table |" in line]
    assert len(rows) == len(report.left)
    for one, row in zip(report.left, rows, strict=True):
        assert row.startswith(f"| {markdown_escape(one.label)} |")


def test_a_number_is_a_multiple_of_another() -> None:
    assert describe_image(CANARIES[:, :1], 2 * CANARIES[:, :1] + 1) == "a multiple of the value"
    assert describe_image(CANARIES[:, :1], CANARIES[:, :1] ** 2) != "a multiple of the value"


# --- the bench


def test_what_is_asked_again_is_what_travelled_to_the_bit() -> None:
    """With states on a device's disk, packets and checksums on one side, and none of them on the other."""
    bench = Bench(
        Own(), furl(state=leaks.later, sends=leaks.a_vector, finish=leaks.send_later), small(DATA, 3), 0
    )
    heard = bench.federate(2)["node-0"]
    pairs = heard.answered()
    assert [packet.header["round"] for packet, _ in pairs] == [0, 1, 2]  # the last one only judges
    for (_, content), (again, _) in zip(pairs, bench.asked([p for p, _ in pairs]), strict=True):
        assert again.to_bytes() == content


def test_without_federated_rates_uploads_are_zero_and_private_values_move() -> None:
    method = methods.furl("user", local=Phase(batch_size=4))
    bench = Bench(Own(), method, small(DATA, 2), 0)
    ((work, _), *_) = bench.federate(1)["node-0"].answered()
    ((answer, kept),) = bench.asked([work], method=still(method, ["linear.weight", "linear.bias"]))
    for item, value in items(answer).items():
        if item.kind == "upload":
            assert not value.any()
    fixed = dict(kept)
    assert not changed(
        items(answer), bench.once(work, fixed, method=still(method, ["linear.weight", "linear.bias"]))
    )
    assert changed(items(answer), bench.once(work, fixed))


def test_a_private_part_behind_a_federated_one_that_begins_at_zero_is_audited() -> None:
    """Its gradient is zero until the other moves, which it does not where an audit holds it still."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x) * self.scale

    method = methods.fedper("own.*", local=Phase(batch_size=2))
    report = audit(Behind(), method, small(DATA, 2), rounds=1)
    assert report.ok
    assert "upload/scale" in {one.label for one in report.left}


class Steep(nn.Module):
    """Its loss is infinite where private values are large, or, with ``signed``, where their sum is above 0."""

    def __init__(self, *, signed: bool) -> None:
        super().__init__()
        self.signed = signed
        self.linear = nn.Linear(3, 3)
        self.user = nn.Parameter(torch.full((3,), -0.01))

    def forward(self, x: Tensor) -> Tensor:
        steep = self.user.sum().sign() * 200 if self.signed else 60 * self.user
        return self.linear(x) + self.user + 1e-3 * steep.exp()


@pytest.mark.parametrize("signed", [False, True])
def test_a_breakdown_by_large_values_alone_is_no_bit_of_theirs(*, signed: bool) -> None:
    method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(1e-4)))
    report = audit(Steep(signed=signed), method, small(DATA, 2), rounds=1)
    assert any(finding.leaves == "status" for finding in report.findings) is signed


def test_every_part_of_a_message_is_an_item() -> None:
    bench = Bench(Own(), methods.furl("user", local=Phase(batch_size=4)), small(DATA, 2), 0)
    for _, content in bench.federate(1)["node-0"].pairs:
        packet = Packet.from_bytes(content)
        found = items(packet)
        for name, value in packet.tensors.items():
            parts = value.reshape(-1) if name == "losses" else [value]
            assert all(any(same(part, have) for have in found.values()) for part in parts), name


def test_the_order_of_tensors_tells_nothing() -> None:
    """A link sends them in an order that a number of what the client keeps decides: the bytes are the same."""
    bench = Bench(Own(), furl().but(upload=(leaks.Orders(),)), small(DATA, 2), 0)
    (work, _), *_ = bench.federate(1)["node-0"].answered()
    ((_, kept),) = bench.asked([work])
    (name,) = [n for n in kept["user-0"] if n.endswith("secret")]
    sent = [
        bench.answer(work, {**kept, "user-0": {**kept["user-0"], name: torch.tensor(value)}}).to_bytes()
        for value in (1.0, 2.0)
    ]
    assert sent[0] == sent[1]


def test_secure_sums_are_looked_at_without_their_masks() -> None:
    sums = SecureSums(clip=1.0, heaviest=10.0)
    bare = audit(Own(), furl(), DATA, rounds=1)
    report = audit(Own(), securely(furl(), sums), DATA, rounds=1)
    assert report.ok
    assert report.findings == bare.findings
    (note,) = set(report.notes) - set(bare.notes)
    assert note.startswith("Uploads are looked at as they are before they are masked")
    seen = {one.label: one.seen_by for one in report.left}
    assert seen["upload/linear.weight"] == "server (in a sum); clients (in the mean)"
    leak = furl(sends=leaks.a_vector, finish=leaks.send_user)
    assert not audit(Own(), securely(leak, sums), DATA, rounds=1).ok


def test_only_bits_count() -> None:
    assert same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert same(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))


# --- the bytes of messages


VALUES = torch.tensor([0.123456, -1.75, 3.0625e-2, 2.5])


@pytest.mark.parametrize(
    "content",
    [
        VALUES.numpy().tobytes(),
        VALUES.numpy().astype(">f4").tobytes(),
        VALUES.numpy().astype("f8").tobytes(),
        VALUES[1:].numpy().astype("f2").tobytes(),
        VALUES.bfloat16().view(torch.int16).numpy().tobytes(),
        str({"weight": float(VALUES[0])}).encode(),
    ],
)
def test_values_are_found_in_bytes(content: bytes) -> None:
    assert any(p in b"begin" + content + b"end" for p in patterns(VALUES))
    assert not any(p in content for p in patterns(VALUES.flip(0) + 1))


def test_what_is_searched_for_stands_in_no_message_by_chance() -> None:
    """Four bytes would, in one of some megabytes."""
    assert min(map(len, patterns(torch.randn(100)))) >= 8


@pytest.mark.parametrize("make", [methods.mr_mtl, pytest.param(methods.fedamp, marks=pytest.mark.slow)])
def test_a_loss_that_tells_how_far_a_private_copy_is_says_so(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make(lam=1e3, local=Phase(batch_size=4, optimizer=sgd(1e-6)))
    data = toy(users=3, examples=16, features=3)
    assert audit(Linear(3, 3), method, data, rounds=1).ok
    monkeypatch.setattr(PulledCopy, "reveals", ())
    [leak] = audit(Linear(3, 3), method, data, rounds=1).leaks
    assert leak.leaves == "loss"
    assert leak.how == "the squared norm of the values"


def test_values_that_ride_beside_a_message_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In no tensor and no line of the header, so that nothing else of the audit sees them."""
    beside: list[bytes] = []
    begin = States.begin

    def noted(self: States, lines: LedgerLines) -> None:
        begin(self, lines)
        beside[:] = [
            values["user"].numpy().tobytes() for client, values in self.values.items() if client == "user-0"
        ]

    monkeypatch.setattr(States, "begin", noted)
    wires = {"leaky": lambda packet: packet.to_bytes() + beside[0], "tight": Packet.to_bytes}
    report = audit(Own(), furl(), DATA, rounds=1, wires=wires)
    assert [str(f) for f in report.leaks] == [
        "wire/leaky changes with private parameter user (the values themselves)"
    ]
    assert report.searched["leaky"] > report.searched["tight"] > 1000
    assert audit(Own(), furl(), DATA, rounds=1, wires={"tight": Packet.to_bytes}).ok


# --- the allow list


def test_the_allow_list() -> None:
    allowed = Allowed((Reveal("sent/sums", ("private own.*",)),), ("loss", "judged", "upload/norm.*"))
    assert allowed.by("loss", of_client=True, copied=False) == "allow = 'loss'"
    assert allowed.by("loss", of_client=True, copied=True) == ""  # a copy wants its name
    assert allowed.by("loss", of_client=False, copied=False) == ""  # opted-out examples, other clients
    assert allowed.by("judged/test", of_client=False, copied=False) == "allow = 'judged'"
    assert allowed.by("upload/norm.bias", of_client=True, copied=True) == "allow = 'upload/norm.*'"
    assert allowed.by("upload/linear.bias", of_client=True, copied=False) == ""
    own, other = ["private own.weight", "private own.bias"], ["private own.weight", "private user"]
    assert allowed.by("sent/sums", own, copied=True) == "the method (reveals)"
    assert allowed.by("sent/sums", other) == allowed.by("sent/sums") == ""
    assert allowed.by("sent/sums", own, of_client=False) == ""


@pytest.mark.parametrize(
    ("copied", "direct", "covered"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_what_is_made_by_steps_is_declared_without_its_copies(
    copied: bool, direct: bool, covered: bool
) -> None:
    made = Reveal("sent/*", ("kept *", "gradients"))
    assert made.covers("sent/control", ["private user"], copied=copied, direct=direct) is covered
    assert made.covers("sent/control", ["kept control"], copied=copied, direct=direct)


def test_hooks_and_links_declare() -> None:
    assert revealed(ROWS["scaffold"][1]) == (Reveal("sent/*", ("kept *", "examples", "gradients")),)
    assert revealed(furl()) == ()
    links = GaussianNoise(1.0), leaks.Declares()
    assert revealed(furl().but(upload=links)) == (Reveal("upload/*", ("kept upload/1/*",)),)


def test_a_term_declares_wherever_it_stands_in_a_loss() -> None:
    told = reveals("loss", of=("examples",))(type("Told", (Term,), {}))()
    for loss in (told, cross_entropy() + 0.5 * told, OnCopy(term=cross_entropy() + told)):
        assert revealed(furl(phases=(Phase(loss=loss),))) == (Reveal("loss", ("examples",)),)
    assert revealed(ROWS["feddyn"][1]) == (Reveal("loss", ("kept *",)),)
    assert revealed(furl(phases=(Phase(loss=OnCopy(term=cross_entropy())),))) == ()


def test_a_device_tells_of_opted_in_examples_alone() -> None:
    data = classes(counts=(4, 2, 3), opted_in=True)
    opted = np.ones(data.examples, bool)
    opted[[0, 1, 2, *data.rows(1, "train")]] = False
    data.columns["opted_in"] = opted
    assert told_counts(data, furl()).tolist() == [1, 0, 3]
    everything = furl(phases=(Phase(trains="private", examples="all"), Phase(trains="federated")))
    assert told_counts(data, everything).tolist() == [1, 1, 3]  # user-1 trains its private part
    assert told_counts(classes(counts=(4, 2)), furl()).tolist() == [4, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1; got 0."),
        ({"allow": ("losses",)}, "An entry of allow must begin with 'summary', 'loss', "),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        audit(Own(), furl(), DATA, **options)  # type: ignore[arg-type]


# --- methods


def kept_by_uploads(name: str) -> dict[str, str]:
    """Return the worst verdict on each thing that a client uploads or sends along, as far as it tells of what it keeps."""
    make, method = ROWS[name]
    report = audit(make(), method, DATA)
    assert report.ok, report.leaks
    found: dict[str, str] = {}
    for one in report.findings:
        if one.source.startswith(("private", "kept")) and one.leaves.startswith(("upload/", "sent/")):
            found[one.leaves] = (
                "declared" if "declared" in (one.verdict, found.get(one.leaves)) else one.verdict
            )
    return found


def test_federated_batch_statistics_tell_nothing_of_a_private_head() -> None:
    found = kept_by_uploads("fedrep")
    assert found == {
        "upload/body.weight": "gradients",
        "upload/body.bias": "gradients",
        "upload/norm.weight": "gradients",
        "upload/norm.bias": "gradients",
    }


# By method: "unchanged", or the worst verdict on what its clients upload or send along.
TABLE = {
    **dict.fromkeys(
        ("fedavg", "fedprox", "fine_tuned", "fedbabu", "fedmmd", "fedfusion", "per_fedavg", "pfedhn"),
        "unchanged",
    ),
    **dict.fromkeys(
        ("local", "ditto", "apfl", "mixture", "fedrod", "ifca", "fedrecon", "knn_per", "fedpac"), "unchanged"
    ),
    **dict.fromkeys(
        ("furl", "fedper", "fedrep", "lg_fedavg", "fedbn", "pfedme", "pfl_da", "kteps", "kteps_star"),
        "gradients",
    ),
    **dict.fromkeys(("feddyn", "moon", "asp_mtl", "gpfl"), "gradients"),
    **dict.fromkeys(("scaffold", "fedala", "fedproto", "mr_mtl", "feddbe", "fedamp", "fedcp"), "declared"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_method(name: str) -> None:
    found = set(kept_by_uploads(name).values())
    worst = next((v for v in ("declared", "gradients") if v in found), "unchanged")
    assert worst == TABLE[name]


NOISE = (GaussianNoise(1e-3),)
MANY_WORDS = texts(counts=(4, 5, 3), vocabulary=300)


@pytest.mark.parametrize("upload", [(), NOISE], ids=["plain", "with noise"])
def test_other_words_give_other_rows_and_other_noise_and_are_no_leak(
    upload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table's rows are declared; noise after it is drawn at another place, which tells of their number alone."""
    monkeypatch.setattr(local_rows, "SMALL", 1)
    method = methods.fedavg().on_client(tables="local").but(upload=upload)
    report = audit(Words(300), method, MANY_WORDS, rounds=1)
    assert report.ok, report.leaks
    assert any(finding.leaves == "rows/embedding.weight" for finding in report.findings)


@pytest.mark.parametrize("upload", [(), NOISE], ids=["plain", "with noise"])
def test_what_moves_a_row_without_gradients_is_a_leak(upload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_rows, "SMALL", 1)
    method = methods.fedavg().on_client(tables="local", finish=leaks.labels_in_a_table).but(upload=upload)
    report = audit(Words(300), method, MANY_WORDS, rounds=1)
    assert "upload/embedding.weight" in {leak.leaves for leak in report.leaks}
