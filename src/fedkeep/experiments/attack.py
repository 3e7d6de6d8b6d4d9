"""Run attacks on a configuration: what uploads and models are worth to an attacker, under each protection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import attacks as a
from fedkeep.core.errors import ConfigError, check_choice, check_range
from fedkeep.core.net import on_cpu
from fedkeep.core.seeds import numpy_generator
from fedkeep.engines.rehearsal import resolve
from fedkeep.experiments.attack_measures import MEASURES, Row, within
from fedkeep.experiments.attack_scenes import AttackView, divided, plain_method, views
from fedkeep.experiments.build import build_data, build_method, build_model, settled
from fedkeep.experiments.config import Config
from fedkeep.experiments.run import Run
from fedkeep.experiments.simulate import simulate, train_counts
from fedkeep.methods import Method
from fedkeep.privacy import Release, epsilon
from fedkeep.report.attacks import TITLES, AttackFinding
from fedkeep.tasks import tasks_in
from fedkeep.tasks.results import Model

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "who": a.recognised,
    "label": a.label_guesses,
    "trait": a.trait_guesses,
    "membership": a.membership,
    "words": a.rows_seen,
    "image": a.invert_image,
    "predictions": a.vector_from_predictions,
    "upload": a.vector_in_upload,
}


@dataclass(frozen=True, kw_only=True)
class AttackRequest:
    """What is attacked, and how hard.

    Attributes:
        attacks: names of ``TITLES``.
        epsilons: ε of a whole run under differential privacy.
        clients: at most so many are attacked, drawn by the seed.
        shadows: models that membership is measured on, each trained on a random half of every client's examples.
        batch: texts in the one step that words are read from.
    """

    attacks: tuple[str, ...] = tuple(TITLES)
    epsilons: tuple[float, ...] = (1.0, 8.0)
    clients: int = 40
    shadows: int = 8
    batch: int = 4

    def __post_init__(self) -> None:
        for name in self.attacks:
            check_choice("An attack must be", name, TITLES)
        check_range("[3, inf]", clients=self.clients, shadows=self.shadows)
        check_range("[1, inf]", batch=self.batch)
        for wanted in self.epsilons:
            check_range("(0, inf]", ε=wanted)


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What was found, and how the protections were set, a line each."""

    findings: list[AttackFinding]
    settings: list[str]


def attack(
    config: Config,
    asked: AttackRequest = AttackRequest(),
    *,
    run: Run | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Attacked:
    """Measure what an attacker gets, under each protection.

    Args:
        config: the configuration; its method is ``split``, and FedAvg of the same model ``plain``.
        asked: which attacks.
        run: a finished run of the configuration; None: it is trained.
        folder: the folder of real data.
        say: called with a line of text before each step.

    Raises:
        ConfigError: the configuration has no uploads (centralised training, nothing federated), or predicts numbers.
    """
    if config.run.centralised or config.method.kind == "local":
        raise ConfigError(
            "There is no upload to attack: this configuration trains in one place, or federates nothing."
        )
    if asked.epsilons:  # said before anything is trained, where the package for it is missing
        epsilon({Release(rate=0.5, noise=1.0): 1}, 1e-5, "rdp")
    data = run.data if run is not None else build_data(config, folder)
    if not tasks_in(data.meta)[0].kind.whole:
        raise ConfigError("The attacks are on classifiers; these data have numbers as labels.")
    config = settled(config, data)
    model = build_model(config, data, folder)
    own = resolve(
        build_method(config.method.model_copy(update={"reduce": None, "secure": None})), model, data
    )
    methods = {"plain": plain_method(config, model), "split": own}

    def trained(method: Method, examples: Any = data, **changes: Any) -> Run:
        settings = {
            **vars(config.run),
            "evaluate_every": 0,
            "evaluate_shared": False,
            "evaluate_adapted": False,
            "device": "cpu",  # where attackers compute
            "metrics": (),
            "trackers": (),  # they are told of runs, not of what an attacker trains
        }
        return simulate(
            model, method, examples, **{**settings, "progress": False, "seed": config.seed, **changes}
        )

    say("Training the plain run ...")
    plain = trained(methods["plain"])
    say("Training the split ...")
    split = trained(own) if run is None else replace(run, method=own, device="cpu", net=on_cpu(run.net))
    inside = split.clients.positions
    able = inside[train_counts(data, own)[inside] > 0]
    drawn = numpy_generator(config.seed, "attack clients").permutation(able)[: asked.clients]
    people = [str(data.ids[c]) for c in np.sort(drawn)]
    if len(people) < 3:
        raise ConfigError(
            "Attacks want at least 3 clients with training examples; these data have {people}.",
            people=len(people),
        )
    say(f"Watching {len(people)} clients ...")
    seen = views(
        plain,
        split,
        people,
        batch=asked.batch,
        epsilons=asked.epsilons,
        cohort=config.run.cohort,
        rounds=split.round,
    )
    found: list[AttackFinding] = []
    for name in asked.attacks:
        say(f"Attack: {TITLES[name]} ...")
        for view in seen:
            made = partial(AttackFinding, attack=TITLES[name], protection=view.name)
            if view.why:
                found.append(made(measure="–", note=f"this protection can't be had here: {view.why}"))
            elif name == "membership" and view.name == "secure":
                again = [f for f in found if f.attack == TITLES[name] and f.protection == "split"]
                note = "the sum is exact, so the model is the split's."
                found += [
                    replace(f, protection=view.name, note=f.note if f.value is None else note) for f in again
                ]
            else:
                rows = (
                    shadowed(view, asked, trained, drawn, config.method.loss.label)
                    if name == "membership"
                    else MEASURES[name](view, config)
                )
                for measure, number, guess, note in rows:
                    mean, low, high = (None,) * 3 if number is None else map(_known, astuple(number))
                    found.append(
                        made(measure=measure, value=mean, low=low, high=high, guess=guess, note=note)
                    )
    return Attacked(findings=found, settings=[f"{v.name}: {v.note}" for v in seen if v.note])


def _known(value: float) -> float | None:
    """Return a number, or None for NaN: the ends of an interval that hangs on one client."""
    return None if math.isnan(value) else value


def shadowed(
    view: AttackView, asked: AttackRequest, trained: Callable[..., Run], people: np.ndarray, label: str
) -> Iterator[Row]:
    """Train models under a protection, each on a random half of every client's examples, and attack each of them.

    Of several tasks the one of the column ``label`` is looked at, or the first where none is.
    Examples that opted out train no released model, so they are none of its members and none of its others.
    """
    scene, people = view.scene, np.sort(people)
    data, method = scene.data, scene.run.method
    tasks = tasks_in(data.meta)
    task = next((k for k, task in enumerate(tasks) if task.label == label), 0)
    alone = f", by the task {tasks[task].name!r} alone" if len(tasks) > 1 else ""
    train = data.split_rows("train", people)
    place = np.full(data.examples, -1)
    place[train] = np.arange(len(train))
    models: dict[Model, str] = {"shared": "the released model", "own": "her own model"}
    if method.predict_shared is None:
        yield f"LiRA AUC, {models.pop('shared')}", None, None, "the shared part cannot predict alone."
    if method.waits(sorted(scene.net.trainable())):
        yield (
            f"LiRA AUC, {models.pop('own')}",
            None,
            None,
            "clients get models of their own after the rounds.",
        )
    client, every = data.clients_of(train), np.ones(len(train), bool)
    opted_in = np.asarray(data.columns.get("opted_in", np.ones(data.examples, bool)), bool)[train]
    learns_all = any(phase.examples == "all" for phase in (*method.client.phases, *method.adapt.phases))
    used = {model: every if model == "own" and learns_all else opted_in for model in models}
    for model in [m for m in models if not used[m].any()]:
        yield f"LiRA AUC, {models.pop(model)}", None, None, "all attacked clients opted out: none is in it."
    if not models:
        return
    inside = np.zeros((asked.shadows, len(train)), bool)
    scores = {model: np.full(inside.shape, np.nan) for model in models}
    ids = [data.ids[c] for c in people]
    for k in range(asked.shadows):
        draw = numpy_generator(scene.run.private.default.seed, "attack halves", round=k)
        halves = [np.sort(draw.permutation(n)[: (n + 1) // 2]) for n in data.counts("train")]
        half, rows = divided(data, halves)
        noisy: dict[str, Any] = {}
        if view.privacy is not None:
            noisy = {
                "privacy": replace(view.privacy, noise_seed=1000 * (k + 1) + (view.privacy.noise_seed or 0)),
                "sampling": "poisson",
            }
        run = trained(method, half, **noisy)
        inside[k, place[rows[half.split_rows("train", people)]]] = True
        for model, split in product(models, ("train", "test")):
            judged = run.judge((model,), split, ids)[task].of(model)
            at = place[rows[judged.row]]
            summed, tokens = (
                np.bincount(at[at >= 0], weights, len(train)) for weights in (judged.loss[at >= 0], None)
            )
            there = tokens > 0  # of an example of tokens the mean over these
            scores[model][k, there] = a.confidence(summed[there] / tokens[there])
    for model, who in models.items():
        if np.isnan(scores[model]).any():
            raise ConfigError(
                "Membership: {who} gives an attacked example no loss that is a number.", who=who
            )
        own = used[model]
        others = (~inside[:, own]).sum(1)
        left_out = f", of {own.sum():,} examples that opted in" if own.sum() < len(own) else ""
        for measure, number in a.membership(scores[model][:, own], inside[:, own], client[own]).items():
            guess = 0.5 if measure.endswith("AUC") else a.guessed_tpr(others)
            note = f"{asked.shadows} models, each attacked in turn{left_out}; {round(others.mean()):,} outside each"
            note += alone
            yield f"{measure}, {who}", within(number), guess, note
