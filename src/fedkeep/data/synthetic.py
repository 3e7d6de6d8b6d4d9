"""Generated data of many users, small enough to learn in a minute and with a known best-possible result.

The text of :func:`many_user_text` names a topic; the label depends on topic and user. So text alone is ambiguous,
and a model must learn something of every user. All probabilities are known, hence so is the best any model can do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.arguments import telling_arguments
from fedkeep.core.errors import DataError, check_choice
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.columns import Column, Ragged, offsets_of
from fedkeep.data.federated import FederatedData
from fedkeep.data.text import CharVocabulary
from fedkeep.tasks import KINDS, of_numbers

MOST_NUMBERS = 100_000_000
MOST_SKEW, MOST_STRENGTH = 3, 1000
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def many_user_text(
    users: int = 80,
    examples: int = 100,
    classes: int = 10,
    kind: str = "multiclass",
    *,
    topics: int | None = None,
    choices: int = 5,
    trait_size: int | None = None,
    strength: float | None = None,
    rate: float = 0.15,
    skew: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Generate short texts of many users, with labels that depend on text and user.

    A text holds words of one topic between common words, so it tells its topic t for certain. User u has a
    trait aᵤ, a unit vector. With unit vectors e for classes and q for topics, drawn once,

        multiclass:  P(y | t, u) ∝ exp(strength · ⟨aᵤ, e_y⟩) over the ``choices`` labels y that topic t allows
        binary:      P(1 | t, u) = sigmoid(b + rᵤ + sₜ + strength · ⟨aᵤ, qₜ⟩),  rᵤ ~ N(0, 1), sₜ ~ N(0, 0.5²)

    where b makes the mean probability ``rate``. Multiclass resembles FURL's Subreddit task, binary its Sticker
    task (clicks). Every user's rows are split 0.8/0.1/0.1 at random.

    ``meta["best"]`` is the best possible result on the drawn test examples when the user's probabilities are
    known: the mean of the highest label probability (multiclass, Bayes accuracy), or the AUC of the true
    probabilities (binary). ``meta["best_global"]`` is the same with only the text known, from P(y | t) over all
    users. ``meta["traits"]`` holds a value per user to colour maps by: ``most_used_label`` or ``click_rate``.
    Selecting clients computes both again.

    Args:
        users: number of clients.
        examples: mean number of examples per user; a user has at least 5.
        classes: number of labels (multiclass only; binary has 2).
        kind: "multiclass" or "binary".
        topics: number of topics; default 6 (multiclass) or 4 (binary).
        choices: labels that a topic allows (multiclass only).
        trait_size: dimension of a user's trait; default 3 (multiclass) or 2 (binary).
        strength: how much the trait decides; default 12 (multiclass) or 4 (binary).
        rate: mean probability of label 1 (binary only).
        skew: standard deviation of the logarithm of a user's number of examples.
        seed: of every draw.

    Returns:
        Columns ``text`` (ragged character ids), ``label``, and outside of batches ``_topic``, ``_best`` and
        ``_best_global``.

    Raises:
        DataError: an argument is out of range.
    """
    check_choice("Wanted kind", kind, ("multiclass", "binary"), DataError)
    clicks = KINDS[kind].ranks_scores  # one score an example: click or not
    usual = (4, 2, 4.0) if clicks else (6, 3, 12.0)
    topics = usual[0] if topics is None else topics
    trait_size = usual[1] if trait_size is None else trait_size
    strength = usual[2] if strength is None else strength
    fits = min(users, examples, topics, choices) >= 1 and trait_size >= 2 and 0 < rate < 1
    fits &= (clicks or choices <= classes) and 0 <= skew <= MOST_SKEW and 0 <= strength <= MOST_STRENGTH
    if not fits:
        raise DataError(
            "Wanted users, examples, topics and choices of at least 1, choices of classes = {classes} at most, trait_size "
            "of at least 2, a rate in (0, 1), a skew of 0 to {most_skew} and a strength of 0 to {most_strength}; got "
            "{users}, {examples}, {topics}, {choices}, {trait_size}, {rate}, {skew} and {strength}.",
            classes=classes,
            most_skew=MOST_SKEW,
            most_strength=MOST_STRENGTH,
            users=users,
            examples=examples,
            topics=topics,
            choices=choices,
            trait_size=trait_size,
            rate=rate,
            skew=skew,
            strength=strength,
        )
    # Of an example its text and the probability of each label; of a user the table and the trait.
    # Classes, or topics, are set apart in pairs, a hundred steps of it.
    apart = 100 * max(classes, topics) ** 2 * trait_size
    _check_size(users * max(examples, 5) * (20 + classes) + users * (topics * classes + trait_size) + apart)
    draw = numpy_generator(seed, f"many_user_text {kind}")
    counts = _skewed_counts(users, examples, skew, draw)
    user = np.repeat(np.arange(users), counts)
    topic = draw.integers(topics, size=len(user))
    text, vocabulary = _texts(topic, topics, draw)

    if clicks:
        table = _click_table(users, topics, trait_size, strength, rate, counts, draw)
    else:
        table = _label_table(users, classes, topics, choices, trait_size, strength, draw)
    # The same without the user: a topic is drawn independently of the user, so users weigh as their examples.
    pooled = np.einsum("u,utc->tc", counts / counts.sum(), table)
    chance = table[user, topic]  # (examples, classes)
    label = (draw.random((len(user), 1)) > chance.cumsum(axis=1)[:, :-1]).sum(axis=1)
    columns: dict[str, Column] = {
        "text": text,
        "label": label,
        "_topic": topic,
        "_best": _known(chance, clicks),
        "_best_global": _known(pooled, clicks)[topic],
    }
    meta: dict[str, Any] = {
        "name": f"many_user_text-{kind}",
        "task": kind,
        "classes": table.shape[-1],
        "label_names": ["no click", "click"] if clicks else [f"label {c}" for c in range(table.shape[-1])],
        "vocabulary": vocabulary.to_dict(),
        "traits": _traits(clicks, user, label, users, table.shape[-1]),
        "source": {"generator": "many_user_text", "seed": seed},
    }
    ids = [f"user-{u:0{len(str(users - 1))}d}" for u in range(users)]
    return FederatedData(columns, offsets_of(counts), ids, None, meta).split_per_user(seed=seed)


@telling_arguments()
def toy(
    users: int = 8,
    examples: int = 20,
    features: int = 4,
    classes: int = 3,
    seed: int = 0,
    task: str = "multiclass",
    dtype: str = "float32",
) -> FederatedData:
    """Generate dense examples for quick tests of engines: columns ``x`` (examples, features) and ``label``.

    Every user's label comes from a linear map shared by all plus a shift of the user's own, with noise;
    ``task`` "regression" gives the number itself, "multiclass" and "binary" the class of the highest score.
    Users have between half and one and a half times ``examples`` rows, split 0.8/0.1/0.1.
    """
    draw = numpy_generator(seed, "toy")
    outputs = {"multiclass": classes, "binary": 2, "regression": 1}.get(task)
    if outputs is None or min(users, examples, features, classes) < 1:
        raise DataError(
            "Wanted a task of 'multiclass', 'binary' or 'regression' and sizes of at least 1; got "
            "{got!r}, {users} users, {examples} examples, {features} features, {classes} classes.",
            got=task,
            users=users,
            examples=examples,
            features=features,
            classes=classes,
        )
    _check_size(users * examples * 1.5 * (features + outputs))
    counts = draw.integers(max(1, examples // 2), examples + examples // 2 + 1, size=users)
    user = np.repeat(np.arange(users), counts)
    x = draw.standard_normal((len(user), features))
    score = x @ draw.standard_normal((features, outputs)) + draw.standard_normal((users, outputs))[user]
    score += 0.1 * draw.standard_normal(score.shape)
    label = score[:, 0].astype(dtype) if of_numbers(task) else score.argmax(axis=1)
    ids = [f"user-{u}" for u in range(users)]
    meta = {"name": "toy", "task": task, "classes": outputs, "source": {"generator": "toy", "seed": seed}}
    data = FederatedData({"x": x.astype(dtype), "label": label}, offsets_of(counts), ids, None, meta)
    return data.split_per_user(seed=seed)


def _check_size(numbers: float) -> None:
    """Raise DataError where data would hold more numbers than fit into a few gigabytes, before any is made."""
    if numbers > MOST_NUMBERS:
        raise DataError(
            "Generated data hold at most {most_numbers:,} numbers, as they are for tests and "
            "demonstrations; these would hold about {numbers:.1e}. Take fewer users, examples, features, "
            "topics or classes.",
            most_numbers=MOST_NUMBERS,
            numbers=numbers,
        )


def _known(chance: Floats, clicks: bool) -> Floats:
    """Return what the best possible result is made of: the highest probability, or that of label 1."""
    return np.asarray(chance[..., 1] if clicks else chance.max(axis=-1))


def _skewed_counts(users: int, examples: int, skew: float, draw: np.random.Generator) -> Ints:
    share = np.exp(skew * draw.standard_normal(users))
    counts: Ints = np.maximum(np.rint(examples * share / share.mean()), 5).astype(np.int64)
    return counts


def _label_table(
    users: int, classes: int, topics: int, choices: int, size: int, strength: float, draw: np.random.Generator
) -> Floats:
    """Return P(y | topic, user), (users, topics, classes)."""
    direction = _spread(classes, size, draw)
    favourite = draw.permutation(np.arange(users) % classes)
    trait = _unit(direction[favourite] + 0.25 * draw.standard_normal((users, size)))
    allowed = np.zeros((topics, classes), bool)
    for topic in range(topics):
        # The labels that fewest topics allow so far, ties at random: every label gets its turn.
        allowed[topic, np.lexsort((draw.random(classes), allowed.sum(axis=0)))[:choices]] = True
    score = strength * trait @ direction.T  # (users, classes)
    odds = np.exp(score - score.max(axis=1, keepdims=True))[:, None, :] * allowed
    return np.asarray(odds / odds.sum(axis=2, keepdims=True))


def _click_table(
    users: int, topics: int, size: int, strength: float, rate: float, counts: Ints, draw: np.random.Generator
) -> Floats:
    """Return P(y | topic, user), (users, topics, 2), whose mean over examples is ``rate``."""
    trait = _unit(draw.standard_normal((users, size)))
    score = strength * trait @ _spread(topics, size, draw).T
    score += 1.0 * draw.standard_normal((users, 1)) + 0.5 * draw.standard_normal(topics)
    low, high = -50.0, 50.0
    for _ in range(60):  # bisection for b: the mean rises with it
        middle = (low + high) / 2
        mean = np.average(_sigmoid(score + middle).mean(axis=1), weights=counts)
        low, high = (middle, high) if mean < rate else (low, middle)
    click = _sigmoid(score + low)
    return np.stack([1 - click, click], axis=-1)


def _texts(topic: Ints, topics: int, draw: np.random.Generator) -> tuple[Ragged, CharVocabulary]:
    """Return a text of 2 to 4 words per topic number: at least one of the topic's own, the rest common ones."""
    own, common = 3, 5
    words = _lexicon(topics * own + common, draw)
    vocabulary = CharVocabulary.from_texts(f"{word} " for word in words)
    rows, most = len(topic), 4
    word = topic[:, None] * own + draw.integers(own, size=(rows, most))
    is_common = draw.random((rows, most)) < 0.3
    is_common[:, 0] = False
    word = np.where(is_common, topics * own + draw.integers(common, size=(rows, most)), word)
    length = draw.integers(2, most + 1, size=rows)
    present = np.arange(most) < length[:, None]
    # The topic's certain word stands anywhere: shuffle the words that are present, row by row.
    place = np.argsort(np.where(present, draw.random((rows, most)), 2.0), axis=1)
    word = np.take_along_axis(word, place, axis=1)
    spelled = vocabulary.encode_all([f"{w} " for w in words]).take(word[present])
    ends = offsets_of(length)
    return Ragged(spelled.values, spelled.offsets[ends]), vocabulary


def _lexicon(number: int, draw: np.random.Generator) -> list[str]:
    """Return different pronounceable words of 4 to 6 letters."""
    consonants, vowels = list("bcdfghjklmnpqrstvwxz"), list("aeiouy")
    words: dict[str, None] = {}
    while len(words) < number:
        syllables = [
            str(draw.choice(consonants)) + str(draw.choice(vowels)) for _ in range(int(draw.integers(2, 4)))
        ]
        words["".join(syllables)] = None
    return list(words)


def _spread(number: int, size: int, draw: np.random.Generator) -> Floats:
    """Return unit vectors that keep away from each other, (number, size): charges on a sphere."""
    point = _unit(draw.standard_normal((number, size)))
    for _ in range(200):
        apart = point[:, None] - point[None]
        distance = np.linalg.norm(apart, axis=-1, keepdims=True) + np.eye(number)[..., None]
        point = _unit(point + 0.05 * (apart / distance**3).sum(axis=1))
    return point


def _unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _sigmoid(score: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-score)))


def _traits(clicks: bool, user: Ints, label: Ints, users: int, classes: int) -> dict[str, list[Any]]:
    used = np.bincount(user * classes + label, minlength=users * classes).reshape(users, classes)
    if clicks:
        return {"click_rate": [round(float(rate), 4) for rate in used[:, 1] / used.sum(axis=1)]}
    return {"most_used_label": [f"label {c}" for c in used.argmax(axis=1)]}
