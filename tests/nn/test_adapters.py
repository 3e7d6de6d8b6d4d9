"""Adapters: W x + (α / r) B A x by hand, which tensors leave under each method, and files as peft's."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import FederatedData, Method, Phase, Split, adam, averaging, methods, sgd
from fedkeep.core.errors import ConfigError
from fedkeep.core.files import read_tensors
from fedkeep.core.params import nbytes
from tests import refusals
from tests.tiny import classes


class Encoder(nn.Module):
    """A transformer of torch's own with a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.up(x).unsqueeze(1)).squeeze(1))


ON = ["*.linear1", "*.linear2"]
DATA = classes(kind="f4")
LOCAL = Phase(optimizer=sgd(0.1), batch_size=4)
A, B = "*.lora_A.default.weight", "*.lora_B.default.weight"
OWN = "*.lora_?.own.weight"
TURNS = (LOCAL.but(trains="federated"), LOCAL.but(trains="private"))


def adapted(second: bool = False, **options: Any) -> nn.Module:
    model = fedkeep.adapters(Encoder(), 2, ON, **options)
    return fedkeep.adapters(model, 2, ON, name="own") if second else model


def stirred(model: nn.Module) -> nn.Module:
    """Draw all adapters, so that they change something."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_(std=0.5)
    return model


def test_the_sum_by_hand() -> None:
    model = fedkeep.adapters(nn.Sequential(nn.Linear(2, 1)), 1, "0", alpha=3.0)
    values = {
        "base_layer.weight": [[1.0, 2]],
        "base_layer.bias": [0.5],
        "lora_A.default.weight": [[1.0, 1]],
        "lora_B.default.weight": [[2.0]],
    }
    model[0].load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    assert float(model(torch.tensor([[1.0, 10.0]])).detach()) == 1 + 20 + 0.5 + 3 * 2 * 11
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "0.lora_A.default.weight",
        "0.lora_B.default.weight",
    ]


def test_at_first_nothing_changes_and_judging_sees_adapters() -> None:
    x, plain = torch.randn(5, 3), Encoder()
    model = adapted()
    assert torch.equal(model(x), plain(x))
    stirred(model)
    training = model(x).detach()
    model.eval()
    with torch.no_grad():  # torch's fast path of an encoder layer would read linear1.weight
        assert torch.allclose(model(x), training, atol=1e-6)
    assert not torch.allclose(training, plain(x), atol=1e-2)


LEAVE: dict[str, tuple[Method, bool, list[str]]] = {
    "FedIT": (methods.fedavg(local=LOCAL), False, ["A", "B"]),
    "FFA-LoRA": (methods.fedavg(local=LOCAL).but(split=Split(frozen=A)), False, ["B"]),
    "FedSA-LoRA": (methods.furl(B, local=LOCAL), False, ["A"]),
    "FedDPA-LoRA": (methods.furl(OWN, local=LOCAL).on_client(phases=TURNS), True, ["A", "B"]),
    "FDLoRA": (
        methods.furl(OWN, local=LOCAL, server=averaging(sgd(0.7, momentum=0.5))).on_client(
            phases=TURNS[::-1]
        ),
        True,
        ["A", "B"],
    ),
    "one PEFT per user": (methods.local(local=LOCAL), False, []),
}


@pytest.mark.parametrize("name", LEAVE)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_which_tensors_leave(name: str, engine: str) -> None:
    method, second, factors = LEAVE[name]
    model = adapted(second)
    run = fedkeep.simulate(model, method, DATA, rounds=2, cohort=4, engine=engine)
    layers = [f"encoder.layers.{k}.linear{n}" for k in (0, 1) for n in (1, 2)]
    wanted = {f"{layer}.lora_{f}.default.weight" for layer in layers for f in factors}
    assert set(run.server) == wanted
    start = dict(model.named_parameters())
    assert all(not torch.equal(run.server[n], start[n]) for n in wanted)
    traffic = {r.metric: r.value for r in run.history if r.split == "traffic" and r.round == 2}
    bound = 1.01 * nbytes({n: start[n] for n in wanted})
    assert traffic["upload_bytes"] <= bound
    assert traffic["download_bytes"] <= bound
    own = run.parameters("user-0")
    assert all(
        torch.equal(own[n], v) for n, v in model.state_dict().items() if ".base_layer." in n or "up." in n
    )


class Attention(nn.Module):
    """Attention of torch's function, in one of its forms."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head, self.how = nn.Linear(3, 4 * 6), nn.Linear(4, 3), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).unflatten(1, (3, 1, 2, 4)).unbind(1)  # (B, 1, 2, 4) each
        how = self.how if self.training else {n: h for n, h in self.how.items() if n != "dropout_p"}
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, **how).mean((1, 2)))


SEEN = torch.tensor([[True, False], [False, False]])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"is_causal": True},
        {"attn_mask": SEEN, "scale": 0.3},
        {"attn_mask": 0.5 * SEEN.float()},
        {"dropout_p": 0.4},
        {"enable_gqa": True},
    ],
)
def test_attention_of_many_clients_at_once(how: dict[str, Any]) -> None:
    one, many = (
        fedkeep.simulate(
            Attention(**how), methods.fedavg(local=LOCAL), DATA, rounds=2, cohort=4, engine=engine
        )
        for engine in ("sequential", "vectorised")
    )
    for name, value in one.server.items():
        assert torch.allclose(many.server[name], value, atol=1e-6)


def test_dropout_inside_attention_is_refused_with_advice() -> None:
    model = adapted()
    model.encoder.layers[0].self_attn.dropout = 0.1
    with refusals.raises(ConfigError, said="its loss cannot be computed for several", method="fedavg"):
        fedkeep.simulate(model, methods.fedavg(local=LOCAL), DATA, rounds=1, cohort=4, engine="vectorised")


def test_a_saved_adapter_is_read_back(tmp_path: Path) -> None:
    model = stirred(adapted(alpha=4.0, train="head.*"))
    fedkeep.save_adapter(model, tmp_path)
    again = fedkeep.load_adapter(Encoder(), tmp_path)
    x = torch.randn(4, 3)
    assert torch.equal(again(x), model(x))
    assert trainable(again) == trainable(model)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match="Wanted a plain LoRA adapter in"):
        fedkeep.load_adapter(Encoder(), tmp_path)


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(OrderedDict(body=nn.Linear(3, 4), head=nn.Linear(4, 2)))


def test_a_layer_that_is_trained_and_adapted_is_read_back(tmp_path: Path) -> None:
    """By hand: x (W + moved)ᵀ + b + moved, and the adapter's part. The file's names are those that peft reads."""
    model = stirred(fedkeep.adapters(plain(), 1, ["body", "head"], train="head.*"))
    with torch.no_grad():
        model.head.base_layer.weight.add_(0.5)
        model.head.base_layer.bias.sub_(2.0)
    fedkeep.save_adapter(model, tmp_path)
    written = read_tensors(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.head.base_layer.weight" in written
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == [
        "head.base_layer"
    ]
    again, x = fedkeep.load_adapter(plain(), tmp_path), torch.randn(5, 3)
    with torch.no_grad():
        base, a, b = plain(), again.head.lora_A.default.weight, again.head.lora_B.default.weight
        within = again.body(x)
        wanted = within @ (base.head.weight + 0.5).T + base.head.bias - 2.0 + within @ a.T @ b.T
        assert torch.allclose(again(x), wanted, atol=1e-6)
        assert torch.equal(again(x), model(x))
    assert trainable(again) == trainable(model)


def test_files_of_two_adapters_fit_in_either_order(tmp_path: Path) -> None:
    """One is on the body, the other on the head, which is trained: each file names the head as it would be alone."""
    model = fedkeep.adapters(fedkeep.adapters(plain(), 1, "body"), 1, "head", train="head.*", name="own")
    stirred(model)
    for name in ("default", "own"):
        fedkeep.save_adapter(model, tmp_path / name, name=name)
    names = [set(read_tensors(tmp_path / name / "adapter_model.safetensors")) for name in ("default", "own")]
    assert "base_model.model.head.weight" in names[0]
    assert "base_model.model.head.base_layer.weight" in names[1]
    x = torch.randn(5, 3)
    for order in (("default", "own"), ("own", "default")):
        again = plain()
        for name in order:
            again = fedkeep.load_adapter(again, tmp_path / name, name=name)
        assert torch.equal(again(x), model(x))


@pytest.mark.slow  # importing peft takes half a minute on a busy machine
def test_peft_reads_a_layer_that_is_trained_and_adapted(tmp_path: Path) -> None:
    """And of two adapters either alone, one on a layer that is trained, one not."""
    peft, x = pytest.importorskip("peft"), torch.randn(5, 3)
    one = fedkeep.adapters(plain(), 1, ["body", "head"], train="head.*")
    two = fedkeep.adapters(fedkeep.adapters(plain(), 1, "body"), 1, "head", train="head.*", name="own")
    for number, (model, name) in enumerate(((one, "default"), (two, "default"), (two, "own"))):
        with torch.no_grad():
            stirred(model).head.base_layer.weight.add_(0.5)
        fedkeep.save_adapter(model, tmp_path / str(number), name=name)
        ours = fedkeep.load_adapter(plain(), tmp_path / str(number))
        theirs = peft.PeftModel.from_pretrained(plain(), tmp_path / str(number)).eval()
        assert torch.allclose(ours(x), theirs(x), atol=1e-6)
        assert not torch.allclose(ours(x), plain()(x), atol=0.1)


def trainable(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.requires_grad]


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = self.b = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize("on", ["*", "a", "b", ["a", "b"]])
def test_a_layer_at_two_places_has_one_adapter_at_both(on: str | list[str], tmp_path: Path) -> None:
    model, x = stirred(fedkeep.adapters(Twice(), 1, on, alpha=3.0)), torch.randn(5, 3)
    assert model.a is model.b
    assert trainable(model) == ["a.lora_A.default.weight", "a.lora_B.default.weight"]
    linear, layer = Twice().a, model.a
    weight = linear.weight + 3 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    wanted = (x @ weight.T + linear.bias) @ weight.T + linear.bias
    assert torch.allclose(model(x), wanted, atol=1e-6)
    fedkeep.save_adapter(model, tmp_path)
    assert torch.equal(fedkeep.load_adapter(Twice(), tmp_path)(x), model(x))
    with pytest.raises(ConfigError, match="'a' has an adapter 'default' already"):
        fedkeep.adapters(model, 1, "b")


def test_what_is_refused() -> None:
    with refusals.raises(ConfigError, layer="*.linear3", model="Encoder"):
        fedkeep.adapters(Encoder(), 2, "*.linear3")
    with pytest.raises(
        ConfigError, match="matches no linear layer"
    ):  # attention reads its weight past its forward
        fedkeep.adapters(Encoder(), 2, "*.out_proj")
    with pytest.raises(ConfigError, match="'haed.weight' matches no parameter to train"):
        fedkeep.adapters(Encoder(), 2, ON, train="haed.weight")
    with pytest.raises(ConfigError, match="has an adapter 'default' already"):
        fedkeep.adapters(adapted(), 2, ON)
    with pytest.raises(ConfigError, match="Wanted rank ≥ 1"):
        fedkeep.adapters(Encoder(), 0, ON)
    with pytest.raises(ConfigError, match="Wanted an adapter 'own'"):
        fedkeep.save_adapter(adapted(), "unused", name="own")


@pytest.mark.parametrize(
    "base", [nn.Linear(3, 4), nn.Linear(5, 3), nn.Conv1d(3, 3, 1)], ids=["out", "in", "conv"]
)
def test_an_adapter_of_another_base_is_refused(tmp_path: Path, base: nn.Module) -> None:
    fedkeep.save_adapter(fedkeep.adapters(nn.ModuleDict({"body": nn.Linear(3, 3)}), 2, "body"), tmp_path)
    with pytest.raises(ConfigError, match="body"):
        fedkeep.load_adapter(nn.ModuleDict({"body": base}), tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", ""])
def test_a_damaged_adapter_is_named(tmp_path: Path, text: str) -> None:
    fedkeep.save_adapter(adapted(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        fedkeep.load_adapter(Encoder(), tmp_path)


# transformers of peft's use of it, and peft of GPT-2's layers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.slow  # importing transformers and peft takes half a minute on a busy machine
def test_transformers_and_peft(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    rng, rows = np.random.default_rng(0), 24
    columns = {"input_ids": rng.integers(1, 50, (rows, 7)), "attention_mask": np.ones((rows, 7), np.int64)}
    columns["attention_mask"][::3, 4:] = 0
    bert = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=3,
    )
    gpt = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    label = rng.integers(0, 3, rows)
    following = fedkeep.data.next_tokens(columns["input_ids"], columns["attention_mask"])
    cases: list[tuple[Any, Any, Any, dict[str, Any]]] = [
        (lambda: transformers.BertForSequenceClassification(bert), ["*.query", "*.value"], label, {}),
        (
            lambda: transformers.BertForTokenClassification(bert),
            ["*.query"],
            columns["input_ids"] % 3,
            {"task": "tokens"},
        ),
        (
            lambda: transformers.GPT2LMHeadModel(gpt),
            "*.c_attn",
            following,
            {"task": "next_token", "classes": 50},
        ),
    ]
    for number, (make, on, labels, meta) in enumerate(cases):
        torch.manual_seed(0)
        base = make()
        data = FederatedData.from_columns(
            np.repeat(np.arange(4), 6),
            columns | {"label": labels},
            (["train"] * 4 + ["valid", "test"]) * 4,
            meta,
        )
        train = [n for n, _ in base.named_parameters() if n.startswith("classifier.")]
        model = fedkeep.adapters(base, 2, on, alpha=8.0, dropout=0.1, train=train)
        method = methods.furl("*.lora_B.*", local=LOCAL.but(optimizer=adam(0.01)))
        run = fedkeep.simulate(model, method, data, rounds=2, cohort=2)
        assert np.isfinite(run.evaluate("test")["loss"])
        assert {n.split(".lora_")[-1] for n in run.server} >= {"A.default.weight"}
        assert len(run.server) == len(train) + sum(".lora_A." in n for n, _ in model.named_parameters())
        fedkeep.save_adapter(model, tmp_path / str(number), run.parameters("1"))
        ours = fedkeep.load_adapter(base, tmp_path / str(number)).eval()
        theirs = peft.PeftModel.from_pretrained(make(), tmp_path / str(number)).eval()
        theirs.load_state_dict(
            {f"base_model.model.{n}": v for n, v in base.state_dict().items()}, strict=False
        )
        for name, value in theirs.named_parameters():  # the same backbone under both
            inner = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            if inner in base.state_dict() and "modules_to_save" not in name:
                value.data.copy_(base.state_dict()[inner])
        batch = {n: torch.from_numpy(v[:5]) for n, v in columns.items()}
        with torch.no_grad():
            assert torch.allclose(ours(**batch).logits, theirs(**batch).logits, atol=1e-6)
            assert not torch.allclose(ours(**batch).logits, base.eval()(**batch).logits, atol=1e-4)
        theirs.save_pretrained(tmp_path / f"{number}-again")
        back = fedkeep.load_adapter(base, tmp_path / f"{number}-again").eval()
        with torch.no_grad():
            assert torch.allclose(back(**batch).logits, ours(**batch).logits, atol=1e-6)
        wrapped = peft.get_peft_model(
            make(), peft.LoraConfig(r=2, target_modules=["c_attn" if number == 2 else "query"])
        )
        run = fedkeep.simulate(wrapped, methods.furl("*lora_B*", local=LOCAL), data, rounds=1, cohort=2)
        assert all("lora_A" in n for n in run.server)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.slow  # importing transformers and peft takes half a minute on a busy machine
def test_a_peft_model_is_saved_and_loaded_as_peft_does(tmp_path: Path) -> None:
    peft, x = pytest.importorskip("peft"), torch.randn(5, 3)

    def wrapped(rank: int = 2, model: nn.Module | None = None, **more: Any) -> Any:
        torch.manual_seed(rank)
        return peft.get_peft_model(model or plain(), peft.LoraConfig(r=rank, target_modules=["body"], **more))

    for number, more in enumerate(({}, {"use_dora": True}, {"modules_to_save": ["head"]})):
        folder, model = tmp_path / str(number), wrapped(**more).eval()
        values = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
        fedkeep.save_adapter(model, folder, values)
        assert not any(torch.equal(p, values[n]) for n, p in model.named_parameters() if n in values)
        theirs = peft.PeftModel.from_pretrained(plain(), folder).eval()  # alone
        ours = fedkeep.load_adapter(wrapped(**more), folder).eval()
        assert torch.equal(ours(x), theirs(x))
        assert all(torch.equal(p, values[n]) for n, p in ours.named_parameters() if n in values)
        assert not torch.allclose(ours(x), plain()(x), atol=0.1)

    with pytest.raises(ConfigError, match=r"no adapter 'own'.*'default'"):
        fedkeep.save_adapter(wrapped(), tmp_path / "none", name="own")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match=r"r = 2.*3"):
        fedkeep.load_adapter(wrapped(3), tmp_path / "0")
    other = nn.ModuleDict({"inner": nn.ModuleDict({"body": nn.Linear(3, 4)})})
    with pytest.raises(ConfigError, match=r"another model.*body.*not there"):
        fedkeep.load_adapter(wrapped(model=other), tmp_path / "0")


@pytest.mark.slow  # importing transformers takes half a minute on a busy machine
def test_a_perplexity_is_the_same_with_a_mask_and_without_one_and_as_by_hand() -> None:
    """Sentences of 3 to 7 words of 7, padded on the right; a pad has no label, and none is told to follow a word."""
    transformers = pytest.importorskip("transformers")
    rng, rows = np.random.default_rng(0), 24
    mask = (np.arange(7) < rng.integers(3, 8, (rows, 1))).astype(np.int64)
    ids = rng.integers(1, 50, (rows, 7)) * mask
    label = fedkeep.data.next_tokens(ids, mask)
    assert (label != -100).sum() == (mask.sum(1) - 1).sum()
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    ).eval()
    found = []
    for more in ({"attention_mask": mask}, {}):
        data = FederatedData.from_columns(
            np.repeat(np.arange(4), 6),
            {"input_ids": ids, "label": label, **more},
            ["test"] * 5 + ["train"] + (["train"] * 5 + ["test"]) * 3,
            {"task": "next_token", "classes": 50},
        )
        run = fedkeep.simulate(model, methods.fedavg(local=LOCAL), data, rounds=0, cohort=2)
        found.append(run.evaluate("test")["perplexity"])
    chosen = [0, 1, 2, 3, 4, 11, 17, 23]
    losses = []
    with torch.no_grad():
        for row in chosen:  # each sentence alone, without its pads
            words = torch.from_numpy(ids[row][: mask[row].sum()])
            logits = model(input_ids=words[None]).logits[0, :-1]
            losses += nn.functional.cross_entropy(logits, words[1:], reduction="none").tolist()
    assert found == pytest.approx([np.exp(np.mean(losses))] * 2, rel=1e-5)
