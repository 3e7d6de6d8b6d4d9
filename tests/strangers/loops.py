"""Strangers' modules in loops as their authors would write them, and what fedkeep makes of the same."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import Method, Phase, Run, sgd, simulate
from fedkeep.core.errors import FedkeepError
from fedkeep.methods import METHODS
from tests.engines.reference import State, mini_batches, rows_of, step
from tests.strangers.modules import CLIENTS, Stranger

RATE, ROUNDS, SEED, PULL = 0.05, 2, 3, 0.5
ENGINES = ("sequential", "vectorised", "auto", "workers")


def made(stranger: Stranger) -> nn.Module:
    """Return the module, always the same one, with 64 bits where it can have them."""
    torch.manual_seed(0)
    module = stranger.make()
    return module.double() if stranger.wide else module


def computes_16_bit(stranger: Stranger) -> bool:
    """Return whether a module computes with 16 bits.

    Engines sum in different orders, so that roundings differ; each step multiplies the difference, and the choice of the
    best of many epochs makes another model of it. Such modules are compared after one pass of every phase, before that.
    """
    kinds = {v.dtype for v in made(stranger).parameters()}
    return stranger.rounds or torch.bfloat16 in kinds or not kinds


def rounds_of(stranger: Stranger) -> int:
    """Return how many rounds a module is trained."""
    return 1 if computes_16_bit(stranger) else ROUNDS


def local(stranger: Stranger) -> Phase:
    """Return what every client does in a round."""
    return Phase(loss=stranger.loss, batch_size=4, optimizer=sgd(RATE))


def method(stranger: Stranger, name: str) -> Method:
    """Return a method with the settings of its author, but for the local phase."""
    settings: dict[str, Any] = {"mu": PULL} if name == "fedprox" else {}
    if computes_16_bit(stranger):
        for argument in inspect.signature(METHODS[name]).parameters:
            if argument.endswith(("epochs", "passes", "steps")):
                settings[argument] = 1
            elif argument == "early_stopping":
                settings[argument] = None
    return METHODS[name](local=local(stranger), **settings)


def trained(stranger: Stranger, name: str, engine: str) -> Run:
    """Return fedkeep's run."""
    apart: dict[str, Any] = (
        {"centralised": True, "engine": "auto"} if name == "asp_mtl" else {"engine": engine}
    )
    if engine == "workers":
        apart["workers"] = 2
    return simulate(
        made(stranger),
        method(stranger, name),
        stranger.read(),
        rounds=rounds_of(stranger),
        cohort=CLIENTS,
        seed=SEED,
        progress=False,
        **apart,
    ).last


def tensors(module: nn.Module) -> State:
    """Return a copy of all parameters and buffers, those that are not persistent, too."""
    return {n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())}


def holding(stranger: Stranger, state: Mapping[str, Tensor]) -> nn.Module:
    """Return the module, made anew for a client, with these values in place."""
    mine = made(stranger)
    with torch.no_grad():
        for name, value in (*mine.named_parameters(), *mine.named_buffers()):
            value.copy_(state[name])
    return mine


def floating(module: nn.Module, batch: Mapping[str, Tensor]) -> State:
    """Return a batch with numbers of the module's kind."""
    wide = all(p.dtype == torch.float64 for p in module.parameters())
    kind = torch.float64 if wide else torch.float32
    return {n: v.to(kind) if v.is_floating_point() else v for n, v in batch.items()}


def loss_of(stranger: Stranger, module: nn.Module, batch: State) -> Tensor:
    """Return the author's loss on a batch."""
    numbers = floating(module, batch)
    return stranger.plain(stranger.answer(stranger.call(module, numbers)), numbers["label"])


def plainly(stranger: Stranger, name: str) -> list[tuple[State, float]]:
    """Return what FedAvg, FedProx or training alone makes of each client's model, and its loss on test examples."""
    data, server = stranger.read(), tensors(made(stranger))
    mine = [dict(server) for _ in range(CLIENTS)]
    for round in range(rounds_of(stranger)):
        for client in range(CLIENTS):
            model = holding(stranger, mine[client])
            with contextlib.suppress(NotImplementedError):  # torch.export's have no modes
                model.train()
            stepper = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
            for batch in mini_batches(data, client, local(stranger), SEED, round):
                loss = loss_of(stranger, model, batch)
                if name == "fedprox":
                    apart = [
                        ((p - server[n]) ** 2).sum() for n, p in model.named_parameters() if p.requires_grad
                    ]
                    loss = loss + PULL / 2 * torch.stack(apart).sum()
                step(stepper, loss)
            mine[client] = tensors(model)
        if name != "local":
            weight = [len(rows_of(data, client)) for client in range(CLIENTS)]
            server = mean_of(mine, weight)
            mine = [dict(server) for _ in range(CLIENTS)]
    found = []
    for client, state in enumerate(mine):
        model = holding(stranger, state)
        with contextlib.suppress(NotImplementedError):
            model.eval()
        with torch.no_grad():
            rows = data.rows(client, "test")
            found.append((state, float(loss_of(stranger, model, data.batch(np.asarray(rows))))))
    return found


def mean_of(states: list[State], weight: list[int]) -> State:
    """Return the weighted mean of all numbers; whole numbers are the first client's."""
    total = sum(weight)
    return {
        n: sum((s[n] * (w / total) for s, w in zip(states, weight, strict=True)), torch.zeros_like(first))
        if first.is_floating_point() or first.is_complex()
        else first
        for n, first in states[0].items()
    }


PLAIN = ("fedavg", "fedprox", "local")
"""Methods whose loop is written here. Others' are in ``tests/methods``; here their engines are compared."""

Found = list[tuple[Mapping[str, Tensor], float]]


def found_in(run: Run) -> Found:
    """Return each client's model and its loss."""
    ids = run.data.ids
    return [(run.parameters(i), run.evaluate("test", clients=[i])["loss"]) for i in ids]


def difference(ours: Found, theirs: Found, most: float) -> str | None:
    """Return what of two results differs by more than so much of the largest number, in words."""
    for client, ((mine, loss), (other, wanted)) in enumerate(zip(ours, theirs, strict=True)):
        for name in mine.keys() & other.keys():
            a, b = mine[name], other[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"client {client}, {name}: {a.dtype}{tuple(a.shape)}, not {b.dtype}{tuple(b.shape)}"
            apart = (
                float((a - b).abs().max())
                if a.is_floating_point() or a.is_complex()
                else float((a != b).any())
            )
            if a.numel() and not apart <= most * max(1.0, float(b.abs().max())):
                return f"client {client}, {name}: apart by {apart:.2g}"
        if not math.isclose(loss, wanted, rel_tol=most, abs_tol=most):
            return f"client {client}: loss {loss:.6g}, not {wanted:.6g}"
    return None


def precision(stranger: Stranger) -> float:
    """Return how near numbers must come: with 16 bits the distance from 1 to the next number."""
    if computes_16_bit(stranger):
        return torch.finfo(torch.bfloat16).eps
    return 1e-8 if stranger.wide else 2e-4


def attempt(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a function gives, or how fedkeep refused it, or how it crashed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(), ""
    except FedkeepError as error:
        return None, f"refused: {type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - what a stranger would see
        return None, f"crashed: {type(error).__name__}: {str(error)[:300]}"


def row(stranger: Stranger, name: str, engines: tuple[str, ...] = ENGINES) -> dict[str, str]:
    """Return for each engine ``equal``, or how it refused, crashed or went wrong.

    The first engine is held against the plain loop, where one is written here and nothing is drawn; it is ``trained``
    where there is none. Others are held against the first.
    """
    first, *others = engines
    given, why = attempt(lambda: found_in(trained(stranger, name, first)))
    if given is None:
        found = {first: why}
    elif name in PLAIN and not stranger.draws:
        wanted, failed = attempt(lambda: plainly(stranger, name))
        if wanted is None:
            found = {first: f"trained, where a plain loop fails: {failed}"}
        else:
            wrong = difference(given, wanted, precision(stranger))
            found = {first: f"wrong: {wrong}" if wrong else "equal"}
    else:
        finite = all(math.isfinite(loss) for _, loss in given)
        found = {first: "trained" if finite else "wrong: loss is not finite"}
    for engine in others if name != "asp_mtl" else ():
        again, why = attempt(lambda: found_in(trained(stranger, name, engine)))  # noqa: B023
        if again is None:
            found[engine] = why
        elif given is None:
            found[engine] = "trained alone"
        else:
            wrong = difference(again, given, precision(stranger))
            found[engine] = f"wrong: {wrong}" if wrong else "equal"
    return found
