"""The local run: mini-batches, phases, noise, local vocabulary, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Client, Method, Phase, Split, adam, declare, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import FederatedData, Ragged, toy
from fedkeep.engines import LocalResult, Stream, local_run
from fedkeep.engines.batches import batches
from fedkeep.engines.client_step import Job, mean_loss, outputs
from fedkeep.engines.lanes import columns_of, model_error
from fedkeep.methods import terms
from fedkeep.models import BagOfWords, DocumentModel
from fedkeep.store import Default, MemoryStore
from tests.engines.reference import rows_of, step
from tests.refusals import raises
from tests.tiny import Logits, Noisy, classes, same_bits, texts

DATA = classes(counts=(7, 5))
DRAWS = Stream(3, "user-0", 2)
USER = Split("user")


def drawn(phase: Phase, draws: Stream = DRAWS, number: int = 0) -> list[list[int]]:
    return [b.tolist() for b in batches(DATA, rows_of(DATA, 0), phase, draws, number)]


def run(
    model: Any,
    phases: Sequence[Phase],
    data: FederatedData = DATA,
    draws: Stream = DRAWS,
    split: Split = USER,
    params: Params | None = None,
    client: int = 0,
    **rule: Any,
) -> LocalResult:
    net = Net(model)
    params = net.initial() if params is None else params
    part = Client(phases=tuple(phases), **rule)
    return local_run(net, split, part, params, split.federated(params), data, rows_of(data, client), draws)


def test_a_pass_uses_every_example_once() -> None:
    for epochs in (1, 3):
        found = drawn(Phase(batch_size=3, epochs=epochs))
        assert [len(b) for b in found] == [3, 3, 1] * epochs
        for epoch in range(epochs):
            assert sorted(r for b in found[3 * epoch : 3 * epoch + 3] for r in b) == list(range(7))
    passes = [found[0:3], found[3:6], found[6:9]]
    assert passes[0] != passes[1] != passes[2]


def test_steps_count_mini_batches() -> None:
    found = drawn(Phase(batch_size=3, steps=5, epochs=99))
    assert [len(b) for b in found] == [3, 3, 1, 3, 3]
    assert sorted(r for b in found[:3] for r in b) == list(range(7))
    assert drawn(Phase(steps=0)) == drawn(Phase(epochs=0)) == []


def test_the_order_depends_on_every_part_of_the_streams_name() -> None:
    phase = Phase(batch_size=7)
    orders = [
        drawn(phase),
        drawn(phase, Stream(4, "user-0", 2)),
        drawn(phase, Stream(3, "user-1", 2)),
        drawn(phase, Stream(3, "user-0", 3)),
        drawn(phase, number=1),
    ]
    assert len({str(o) for o in orders}) == 5
    assert drawn(phase) == orders[0]


class Noting(torch.nn.Module):
    """Notes what it is given, and then spoils it."""

    def __init__(self, note: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.bias, self.note = torch.nn.Parameter(torch.zeros(3)), note

    def forward(self, text: torch.Tensor, text_length: torch.Tensor) -> torch.Tensor:
        self.note((text.tolist(), text_length.tolist(), text.is_contiguous()))
        text.zero_()
        text_length.zero_()
        return self.bias.expand(len(text), -1)


@pytest.mark.parametrize("window", [1, 200, 400, 1 << 20])
def test_batches_that_are_gathered_together_are_each_its_own(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeep.engines.batches.WINDOW_BYTES", window)
    lengths = [3, 0, 0, 0, 2, 9, 0]  # some mini-batches have no character at all
    data = FederatedData.from_columns(
        ["a"] * 7,
        {
            "text": Ragged.from_rows([[10 * row + k for k in range(n)] for row, n in enumerate(lengths)]),
            "label": [0, 1, 2, 0, 1, 2, 0],
        },
        split=["train"] * 7,
    )
    phase = Phase(batch_size=2, epochs=2)
    seen: list[tuple[Any, ...]] = []
    run(Noting(seen.append), [phase], data, split=Split(), turns=(2,))
    expected = []
    for chosen in batches(data, rows_of(data, 0), phase, DRAWS, 0):
        longest = max(1, *(lengths[row] for row in chosen))
        text = [[10 * row + k if k < lengths[row] else 0 for k in range(longest)] for row in chosen.tolist()]
        expected += [(text, [max(1, lengths[row]) for row in chosen], True)] * 2
    assert len(expected) == 16
    rehearsed = 2
    assert seen[rehearsed:] == expected


def test_no_example_no_step() -> None:
    net = Net(Logits())
    result = local_run(net, Split("user"), Client(), net.initial(), {}, DATA, np.zeros(0, np.int64), DRAWS)
    assert (result.steps, str(result.loss)) == (0, "nan")
    assert same_bits(result.params, net.initial())


def test_what_is_given_is_not_changed() -> None:
    model = Noisy(dropout=0.5)
    params = Net(model).initial()
    before = {n: v.clone() for n, v in params.items()}
    split = Split("user")
    received = split.federated(params)
    random = torch.random.get_rng_state()
    result = local_run(
        Net(model),
        split,
        Client(phases=(Phase(batch_size=4, optimizer=adam(0.1)),)),
        params,
        received,
        DATA,
        rows_of(DATA, 0),
        DRAWS,
    )
    assert same_bits(params, before)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(not torch.equal(result.params[n], before[n]) for n in before)
    assert not any(v.requires_grad for v in result.params.values())
    assert result.steps == 2


def test_the_loss_is_the_mean_over_the_last_phases_batches() -> None:
    model = Logits().double()
    one = run(model, [Phase(batch_size=4, optimizer=sgd(0.0))])
    rows = drawn(Phase(batch_size=4))
    losses = [torch.nn.functional.cross_entropy(model(b["x"]), b["label"]) for b in map(DATA.batch, rows)]
    assert one.loss == pytest.approx(float(sum(losses).detach()) / 2, abs=1e-12)  # type: ignore[union-attr]
    two = run(
        model,
        [Phase(batch_size=4, optimizer=sgd(0.0)), Phase(loss=terms.l2_penalty("user"), optimizer=sgd(0.0))],
    )
    assert two.loss == pytest.approx(0.5 * float((model.user**2).sum().detach()), abs=1e-12)


def test_a_phase_trains_what_it_names_and_nothing_else() -> None:
    model = Logits()
    start = Net(model).initial()
    for trains, moved in (
        ("private", {"user"}),
        ("federated", {"linear.weight", "linear.bias"}),
        ("*.bias", {"linear.bias"}),
    ):
        result = run(model, [Phase(trains=trains)]).params
        assert {n for n in start if not torch.equal(start[n], result[n])} == moved


def test_phases_run_one_after_the_other_with_fresh_optimisers() -> None:
    model = Logits().double()
    phases = [
        Phase(trains="private", optimizer=sgd(0.2, momentum=0.9), batch_size=3),
        Phase(trains="federated", batch_size=3, optimizer=adam(0.1)),
    ]
    together = run(model, phases).params
    ours = torch.nn.ParameterDict()
    module = Logits().double()
    first = torch.optim.SGD([module.user], 0.2, 0.9)
    second = torch.optim.Adam(module.linear.parameters(), 0.1)
    for number, stepper in enumerate((first, second)):
        for rows in drawn(phases[number], number=number):
            batch = DATA.batch(rows)
            module.zero_grad()
            torch.nn.functional.cross_entropy(module(batch["x"]), batch["label"]).backward()
            stepper.step()
    torch.testing.assert_close(together, module.state_dict(), rtol=0, atol=1e-12)
    assert len(ours) == 0


def test_dropout_draws_from_the_clients_own_stream() -> None:
    model = Noisy(dropout=0.5)
    phases = [Phase(batch_size=7)]
    torch.manual_seed(1)
    one = run(model, phases).params
    torch.manual_seed(2)
    assert same_bits(one, run(model, phases).params)
    model.drop.p = 0.0
    assert not same_bits(one, run(model, phases).params)


def test_a_phases_noise_depends_on_no_other_phase() -> None:
    """Otherwise the number of opted-out examples in a private phase would choose the masks of a federated one."""
    model = Noisy(dropout=0.5)
    still = Phase(batch_size=7, optimizer=sgd(0.0), trains="private")
    last = Phase(batch_size=7, trains="linear.*")
    found = [
        run(model, [dataclasses.replace(still, steps=steps), last]).params["linear.weight"]
        for steps in (1, 2)
    ]
    assert torch.equal(found[0], found[1])
    drawn: list[float] = []
    run(Drawing(drawn.append), [last, last])
    rehearsed = 2
    assert len(drawn[rehearsed:]) == len(set(drawn[rehearsed:])) == 2


class Drawing(Logits):
    """Notes a random number of every forward."""

    def __init__(self, note: Callable[[float], None]) -> None:
        super().__init__()
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(float(torch.rand(())))
        return super().forward(x)


def test_optimiser_states_live_on_where_they_are_given() -> None:
    model = Logits().double()
    phase = Phase(optimizer=adam(0.1), batch_size=3)
    net, split = Net(model), Split("user")
    state = [phase.optimizer.init()]
    params = net.initial()
    for number in range(2):
        result = local_run(
            net,
            split,
            Client(phases=(phase,)),
            params,
            {},
            DATA,
            rows_of(DATA, 0),
            Stream(3, "user-0", number),
            states=state,
        )
        params = result.params
    module = Logits().double()
    stepper = torch.optim.Adam(module.parameters(), 0.1)
    for number in range(2):
        for rows in drawn(phase, Stream(3, "user-0", number)):
            batch = DATA.batch(rows)
            step(stepper, torch.nn.functional.cross_entropy(module(batch["x"]), batch["label"]))
    torch.testing.assert_close(params, module.state_dict(), rtol=0, atol=1e-12)


def document(lookup: bool) -> DocumentModel:
    torch.manual_seed(3)
    model = DocumentModel(200, 3, 4, embedding_dim=5, hidden=3, mlp=6).double()
    if not lookup:
        declare(model, lookup={})
    return model


def words(lookup: bool) -> BagOfWords:
    torch.manual_seed(3)
    model = BagOfWords(200, 3, 4, embedding_dim=5, mlp=6).double()
    if not lookup:
        declare(model, lookup={})
    return model


@pytest.mark.parametrize(
    "phase",
    [
        Phase(batch_size=2, epochs=2),
        Phase(batch_size=2, optimizer=sgd(0.3, momentum=0.9), epochs=3),
        Phase(batch_size=2, optimizer=adam(0.1), epochs=3),
        Phase(batch_size=2, optimizer=sgd(0.3, weight_decay=0.1)),
        Phase(batch_size=2, optimizer=adam(0.1, weight_decay=0.1)),
        Phase(batch_size=2, clip_norm=0.05),
        Phase(batch_size=2, loss=terms.cross_entropy() + 0.1 * terms.l2_penalty("embedding.*")),
        Phase(
            batch_size=2,
            loss=terms.cross_entropy() + 0.1 * (terms.l2_penalty("embedding.*") + terms.l2_penalty("user")),
        ),
        Phase(
            batch_size=2,
            loss=terms.multi_task({"a": terms.l2_penalty("embedding.*") + terms.l2_penalty("user")}),
        ),
    ],
    ids=[
        "sgd",
        "momentum",
        "adam",
        "decay",
        "adam decay",
        "clip",
        "penalty",
        "sum of penalties",
        "nested penalty",
    ],
)
@pytest.mark.parametrize("make", [document, words], ids=["document", "words"])
def test_a_local_vocabulary_changes_nothing(phase: Phase, make: Any) -> None:
    """Training only the rows that a client's texts use equals training the whole table."""
    data = texts(vocabulary=200)
    for client, split in enumerate((Split("user"), Split("*"))):
        narrow = run(make(True), [phase], data, client=client, split=split).params
        whole = run(make(False), [phase], data, client=client, split=split).params
        for name in whole:
            torch.testing.assert_close(narrow[name], whole[name], rtol=0, atol=1e-12)
        assert narrow["embedding.weight"].shape == (200, 5)


@pytest.mark.parametrize(("depends", "whose"), [("linear.*", "private"), ("user", "federated")])
def test_what_is_trained_and_no_loss_depends_on_is_an_error(depends: str, whose: str) -> None:
    with raises(MethodError, whose=whose):
        run(Logits(), [Phase(loss=terms.l2_penalty(depends))])
    run(Logits(), [Phase(loss=terms.l2_penalty(depends)), Phase()])  # of another phase they are


def test_received_parameters_carry_no_graph() -> None:
    """A term that pulls towards what was received moves the trained side alone."""
    from dataclasses import dataclass

    from fedkeep.methods.terms import Term

    @dataclass(frozen=True)
    class Pull(Term):
        def __call__(self, net: Net, params: Params, batch: Params, received: Params) -> torch.Tensor:
            assert not any(v.requires_grad for v in received.values())
            return 0.5 * sum(((params[n] - received[n]) ** 2).sum() for n in received)  # type: ignore[return-value]

    model = Logits().double()
    result = run(model, [Phase(loss=Pull(), trains="federated", epochs=3, batch_size=3)])
    assert same_bits(result.params, Net(model).initial())  # nothing pulls at the start
    moved = run(model, [Phase(batch_size=7), Phase(loss=Pull(), optimizer=sgd(1.0), batch_size=7)]).params
    for n, v in (
        Split("user").federated(Net(model).initial()).items()
    ):  # one step of rate 1 on ½‖w − w_t‖² leads back
        torch.testing.assert_close(moved[n], v, rtol=0, atol=1e-12)
    assert isinstance(methods.fedavg(), Method)


@pytest.mark.parametrize(
    ("error", "examples", "message"),
    [
        (
            IndexError("out of range"),
            3,
            "3 examples: out of range. Check its forward and the data's columns: an id or a",
        ),
        (
            ValueError("More than 1."),
            1,
            "1 example: More than 1. Check its forward and the data's columns; batch norm",
        ),
        (RuntimeError("shapes "), 1000, "1000 examples: shapes. Check its forward and the data's columns."),
        (
            IndexError("Target 2 is out of bounds."),
            15,
            "15 examples: Target 2 is out of bounds. It gives no score for the class 2: let its last layer have",
        ),
        (
            torch.OutOfMemoryError("none left"),
            8,
            "8 examples: none left. Use a smaller batch_size, or another device.",
        ),
    ],
)
def test_what_helps_a_model_that_failed(error: Exception, examples: int, message: str) -> None:
    found = str(model_error("Client 'a', round 2", examples, error))
    assert found.startswith(f"Client 'a', round 2: the model failed on a batch of {message}")


@pytest.mark.parametrize("engine", ["sequential", "auto"])
@pytest.mark.parametrize("inputs", [4, 5])
def test_a_model_of_another_size_is_told_what_an_example_has(engine: str, inputs: int) -> None:
    """Inputs of another size are told the columns, too few outputs how many there must be."""
    data = toy(features=4, classes=3)
    with pytest.raises(MethodError) as caught:
        simulate(torch.nn.Linear(inputs, 2), methods.fedavg(), data, rounds=1, engine=engine)
    told = "at least 3 outputs" if inputs == 4 else "x (4,) float32, label () int64"
    assert told in str(caught.value)


def test_columns_of_fedkeeps_own_are_not_told() -> None:
    batch = {"x": torch.ones(2, 4), **dict.fromkeys(("weight", "client", "_rows"), torch.ones(2))}
    assert columns_of(batch) == "x (4,) float32"


class FailsWhenJudged(torch.nn.Module):
    """Cannot compute with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise IndexError("index out of range")
        return self.head(self.features(x))


@pytest.mark.parametrize(
    "call",
    [
        lambda job, rows, params: mean_loss(job, rows, {}, params),
        lambda job, rows, params: list(outputs(job, params, rows, Net.__call__)),
    ],
    ids=["loss", "outputs"],
)
def test_a_model_that_fails_for_a_hook_is_told_with_the_client(call: Callable[..., Any]) -> None:
    data = FederatedData.from_columns(
        ["a"] * 4 + ["b"] * 4,
        {"x": np.ones((8, 2), np.float32), "label": np.array([0, 1] * 4)},
        ["train"] * 8,
        meta={"task": "multiclass", "classes": 2},
    )
    module = FailsWhenJudged()
    job = Job(methods.ifca(), Net(module), data, MemoryStore(Default({}), data.ids), 0)
    with raises(MethodError, who="Client 'b'", batch="a batch of 4 examples", examples=4):
        call(job, np.arange(4, 8), dict(module.named_parameters()))
