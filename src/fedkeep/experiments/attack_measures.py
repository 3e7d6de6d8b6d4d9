"""What each attack finds on what is seen under one protection: a number, its interval, and guessing.

Intervals are over clients. Clients of one sum share one guess, and are not independent: there they are over sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import attacks as a
from fedkeep.attacks import Sighting
from fedkeep.core.seeds import numpy_generator
from fedkeep.experiments.attack_scenes import AttackScene, AttackView
from fedkeep.experiments.config import Config
from fedkeep.metrics.scores import auc
from fedkeep.metrics.worth.intervals import Interval, jackknife
from fedkeep.tasks import tasks_in

IMAGES, QUERIES, MOST_PRIVATE = 4, 64, 10_000
Row = tuple[str, Interval | None, float | None, str]
"""Measure, number and interval (None: it does not apply), what guessing gives, and a note."""


def share(right: Sequence[bool] | np.ndarray, guesses: int | None = None) -> Interval:
    """Return a share and its 95 % interval (Wilson, 1927), which has a width where all are right, or none.

    Args:
        right: (K,) of each client.
        guesses: how many were made: clients of one sum share one. No share varies more than if all of them were right
            together or wrong. None: one for each client.
    """
    n, z = guesses or len(right), 1.959964
    p = float(np.mean(right))
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(p, (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n))


def mean(values: Sequence[float], of: Sequence[int] | None = None) -> Interval:
    """Return the mean over clients and its interval, by Student's T; ends of NaN where nothing says how it varies.

    Args:
        values: (K,) of each client.
        of: (K,) the number of the sum that each client's value is made of; sums are left out one at a time. None: each
            has its own.
    """
    each, group = np.asarray(values, np.float64), np.asarray(range(len(values)) if of is None else of)
    groups = np.unique(group)
    if len(groups) < 2:
        return Interval(float(each.mean()), math.nan, math.nan)
    left = [(each.sum() - each[group == k].sum()) / (group != k).sum() for k in groups]
    return jackknife(float(each.mean()), left)


def sums_of(sightings: Sequence[Sighting]) -> dict[str, int]:
    """Return by client the number of what was seen of it."""
    return {client: number for number, s in enumerate(sightings) for client in s.clients}


def within(found: Interval, least: float = 0.0) -> Interval:
    """Return an interval of a share, an AUC or a cosine cut to what is possible."""
    return Interval(found.mean, max(found.low, least), min(found.high, 1.0))


def who(view: AttackView, config: Config) -> Iterator[Row]:
    """Link two rounds: name the sender, by all and by the private part alone; say who is in a sum."""
    people = view.scene.clients
    known = view.first if view.bare else view.scene.bare("").first
    alike = a.likeness(known, view.second)
    parts = (("named right", None), ("named right by the private part alone", view.private))
    for measure, names in parts:
        if not view.bare:
            yield measure, None, None, "a sum has no single sender."
            continue
        found = alike if names is None else a.likeness(known, view.second, names)
        right = a.recognised(found)
        gone = names is not None and not set(names) & set(view.first[0].changes)
        yield measure, share(right), 1 / len(people), "it is in no upload, so this is a guess" if gone else ""
    inside = np.array([[client in s.clients for s in view.second] for client in people])
    if inside.all():
        yield (
            "in it or not (AUC)",
            None,
            None,
            "every client is in every sum, so there is nothing to find out.",
        )
        return
    score, truth, client = a.present(alike, inside)
    there = np.unique(client)
    without = [auc(score[client != k], truth[client != k]) for k in there]
    note = (
        "one earlier upload of each client is known"
        if view.bare
        else "bare earlier uploads of all clients are known"
    )
    yield "in it or not (AUC)", within(jackknife(auc(score, truth), without)), 0.5, note


def without_classes(scene: AttackScene) -> str:
    """Return why no client holds a class more than others, or an empty text."""
    kind = tasks_in(scene.data.meta)[0].kind
    return "" if kind.one_class else f"labels are {kind.unlike_classes}."


def held(scene: AttackScene, config: Config) -> dict[str, int]:
    """Return the class that each client has most training examples of."""
    labels = {c: scene.batch(c)[config.method.loss.label].numpy() for c in scene.clients}
    return {client: int(np.bincount(label).argmax()) for client, label in labels.items()}


def label(view: AttackView, config: Config) -> Iterable[Row]:
    """Guess the class that a client holds most, from the last layer's bias."""
    measure = "most frequent class right"
    if why := without_classes(view.scene):
        return [(measure, None, None, why)]
    true = held(view.scene, config)
    classes = int(view.scene.data.meta["classes"])
    changes = view.first[0].changes
    biases = [n for n, v in changes.items() if n.endswith("bias") and v.shape == (classes,) and bool(v.any())]
    if not biases:
        return [(measure, None, None, "the last layer's bias is private, and in no upload.")]
    found = a.label_guesses(view.first, biases[-1])
    guess = Counter(true.values()).most_common(1)[0][1] / len(true)
    return [(measure, share([found[c] == true[c] for c in found], len(view.first)), guess, biases[-1])]


def trait(view: AttackView, config: Config) -> Iterable[Row]:
    """Guess the same by a classifier over uploads."""
    measure = "most frequent class right"
    if why := without_classes(view.scene):
        return [(measure, None, None, why)]
    true = list(held(view.scene, config).values())
    if not view.bare:
        return [(measure, None, None, "a sum has no single sender whose trait it could show.")]
    if len(set(true)) < 2:
        return [(measure, None, None, "all clients hold the same class most.")]
    right = np.array(a.trait_guesses(view.first, true)) == true
    guess = Counter(true).most_common(1)[0][1] / len(true)
    return [(measure, share(right), guess, "the other clients' classes are known")]


def words(view: AttackView, config: Config) -> Iterator[Row]:
    """Read words from the rows of the embedding that changed."""
    scene = view.scene
    layers = (
        n
        for n, layer in scene.net.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    )
    tables = [f"{n}.weight" for n in layers if f"{n}.weight" in view.first[0].changes]
    tables = tables if "text" in scene.data.columns else []
    if not tables:
        yield "words, F1", None, None, "no table of words is in an upload."
        return
    for sightings, data, measure in (
        (view.step, scene.few, f"F1, one step on {scene.few.counts('train').max()} texts"),
        (view.first, scene.data, "F1, a whole round"),
    ):
        true = {c: set(scene.batch(c, data=data)["text"].flatten().tolist()) - {0} for c in scene.clients}
        common = [w for w, _ in Counter(w for some in true.values() for w in sorted(some)).most_common()]
        found = {c: rows for s in sightings for rows in [a.rows_seen(s, tables[0])] for c in s.clients}
        guess = float(np.mean([a.words_f1(common[: len(true[c])], true[c]) for c in found]))
        exact = sum(found[c] - {0} == true[c] for c in found)
        note = f"exactly right for {exact} of {len(found)} clients; guessing: the words that most clients use"
        if view.bare and sightings[0].noise:
            note += f"; the method itself adds noise of {sightings[0].noise:g} to uploads"
        number = mean([a.words_f1(found[c], true[c]) for c in found], list(sums_of(sightings).values()))
        yield measure, within(number), guess, note


def image(view: AttackView, config: Config) -> Iterable[Row]:
    """Rebuild images from one step on one image of each client."""
    scene, measure = view.scene, "PSNR, dB, one step on one image"
    column = "image"
    if column not in scene.data.columns:
        return [(measure, None, None, "the data have no images.")]
    phase, known = scene.method.client.phases[0], scene.known()
    shown = {c: unit(scene.batch(c, data=scene.one)[column])[0] for c in scene.clients}
    common = torch.stack([unit(scene.batch(c)[column]).mean(0) for c in scene.clients]).mean(0)
    values, guesses = [], []

    def loss(net: Any, params: Any, batch: Any) -> Tensor:
        value: Tensor = phase.loss(net, params, batch, scene.server.params)
        return value

    shared = dict(list(sums_of(view.single).items())[:IMAGES])
    for client, number in shared.items():
        right = int(scene.batch(client, data=scene.one)[config.method.loss.label][0])
        found = a.invert_image(scene.net, known, view.single[number], common, right, loss)
        values.append(a.psnr(found, shown[client]))
        guesses.append(a.psnr(common, shown[client]))
    note = (
        f"{len(values)} images; guessing: the mean image. A sum is taken for the upload of each client in it."
    )
    return [(measure, mean(values, list(shared.values())), float(np.mean(guesses)), note)]


def unit(images: Tensor) -> Tensor:
    """Return images from 0 to 1."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def predictions(view: AttackView, config: Config) -> Iterator[Row]:
    """Fit the private part to predictions."""
    scene, method = view.scene, view.scene.method
    unseen, near = "predicts as she does, on unseen inputs", "cosine with her vector"
    if view.name != "split":
        why = (
            "there is no private part."
            if view.name == "plain"
            else "nothing protects predictions; see split."
        )
        yield unseen, None, None, why
        return
    default = {n: v for n, v in scene.run.private.default(scene.clients[0]).items() if n in scene.private}
    size = sum(v.numel() for v in default.values())
    if not default or size > MOST_PRIVATE or method.waits(sorted(scene.net.trainable())):
        yield (
            unseen,
            None,
            None,
            f"no private part of at most {MOST_PRIVATE:,} numbers is trained in the rounds.",
        )
        return
    rows = scene.data.split_rows("test")
    rows = numpy_generator(config.seed, "attack queries").permutation(rows)[: 2 * QUERIES]
    asked, rest = scene.data.batch(rows[::2]), scene.data.batch(rows[1::2])
    known, agree, guess, cosines = scene.known(), [], [], []
    vectors = {c: scene.first[c].before for c in scene.clients}
    scene.net.train(False)
    for client in scene.clients[:10]:
        true = {**known, **vectors[client]}
        with torch.no_grad():
            seen = method.predict(scene.net, true, asked).log_softmax(-1)
        found = a.vector_from_predictions(scene.net, known, default, asked, seen, method.predict)
        with torch.no_grad():
            wanted, got, usual = (
                method.predict(scene.net, {**known, **p}, rest).argmax(-1)
                for p in (vectors[client], found, default)
            )
        agree.append(float((wanted == got).double().mean()))
        guess.append(float((wanted == usual).double().mean()))
        if len(default) == 1:
            cosines.append((client, next(iter(found.values()))))
    note = f"{len(rows[::2])} predictions seen, {size:,} private numbers; guessing: the model of a new client"
    yield unseen, within(mean(agree)), float(np.mean(guess)), note
    if cosines:
        name = next(iter(default))
        yield (
            near,
            *against({c: v.reshape(-1) for c, v in cosines}, {c: v[name] for c, v in vectors.items()}),
            "",
        )


def upload(view: AttackView, config: Config) -> Iterator[Row]:
    """Read the private vector from one upload's first linear layer."""
    scene, rounds = view.scene, (("cosine, one local step", view.step), ("cosine, a whole round", view.first))
    example = scene.batch(scene.clients[0], data=scene.one)
    known = {**scene.known(), **scene.first[scene.clients[0]].before}
    vectors = [n for n in view.private if n in known and known[n].dim() == 1 and n in scene.private]
    places = {n: p for n in vectors if (p := a.place_of(scene.net, known, example, n)) is not None}
    fits = {
        n: p for n, p in places.items() if {f"{p[0]}.weight", f"{p[0]}.bias"} <= set(view.first[0].changes)
    }
    for measure, sightings in rounds:
        if not fits:
            why = (
                "everybody shares one vector, which is federated."
                if view.name == "plain"
                else ("no private vector goes into a federated linear layer as it is.")
            )
            yield measure, None, None, why
            continue
        name, (layer, inputs) = next(iter(fits.items()))
        true = {c: o.before[name] for c, o in scene.first.items()}
        found = {c: a.vector_in_upload(s, layer, inputs) for s in sightings for c in s.clients}
        errors = [float((found[c] - true[c]).norm() / true[c].norm().clamp(min=1e-30)) for c in found]
        number, guess = against(found, true, sums_of(sightings))
        yield (
            measure,
            number,
            guess,
            f"median relative error {np.median(errors):.1g}; guessing: another client's",
        )


def against(
    found: dict[str, Tensor], true: dict[str, Tensor], of: dict[str, int] | None = None
) -> tuple[Interval, float | None]:
    """Return the mean cosine of vectors with the true ones, and that of other clients' vectors with these.

    Args:
        found, true: by client; one whose true vector is zero is left out, unless all are.
        of: by client the number of the sum that its vector was found in; None: each has its own.

    Returns:
        The second is None where one client is left.
    """
    names = [c for c in found if bool(true[c].any())] or list(found)
    own = [_cosine(found[c], true[c]) for c in names]
    others = [_cosine(true[d], true[c]) for c in names for d in names if d != c]
    number = mean(own, None if of is None else [of[c] for c in names])
    return within(number, -1.0), float(np.mean(others)) if others else None


def _cosine(one: Tensor, two: Tensor) -> float:
    return float(nn.functional.cosine_similarity(one.double(), two.double(), dim=0))


MEASURES: dict[str, Callable[[AttackView, Config], Iterable[Row]]] = {
    "who": who,
    "label": label,
    "trait": trait,
    "words": words,
    "image": image,
    "predictions": predictions,
    "upload": upload,
}
