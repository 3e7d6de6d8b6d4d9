"""What a device knows from its user's own messages: counts, naive Bayes over words, and the most similar messages.

Nothing here is trained, and nothing leaves. Scores are over all labels, so that a device can add them to the logits of
a model that it was sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.data.columns import Ragged

Array = NDArray[Any]
DAY = 86_400.0
HALF_LIFE, RECENT = 8.0, 0.6
"""Of the prior by time: in days, and the weight of the decayed shares beside the plain ones."""
SHRINK, NEIGHBOURS = 5.0, 20
"""Of the memory: κ and k of ``memory_scores``."""


def log_shares(counts: Array, late: Array | float = 0.0, recent: float = 0.0, floor: float = 1e-3) -> Array:
    """Return log(floor / C + (1 − recent) share + recent late share), (…, C); shares of nothing are 1 / C.

    Args:
        counts: how often each of C labels was used, (…, C).
        late: the same, later ones weighing more.
        recent: weight of ``late``, 0 to 1.
        floor: of a share, divided among all labels.
    """

    def share(of: Array) -> Array:
        total = of.sum(-1, keepdims=True)
        found: Array = np.divide(of, total, out=np.full_like(of, 1 / of.shape[-1]), where=total > 0)
        return found

    mixed = (1 - recent) * share(counts) + (recent * share(np.asarray(late)) if recent else 0.0)
    found: Array = np.log(floor / counts.shape[-1] + mixed)
    return found


def decayed(label: Array, time: Array, classes: int, half_life: float) -> Array:
    """Return each message's label as a row of C entries: 2^(−age / half-life), age in days before the newest."""
    one = np.zeros((len(label), classes))
    one[np.arange(len(label)), label] = np.exp2((time - time.max(initial=0)) / (DAY * half_life))
    return one


def own_prior(
    label: Array,
    time: Array,
    classes: int,
    *,
    by_time: bool,
    half_life: float = HALF_LIFE,
    recent: float = RECENT,
) -> tuple[Array, Array]:
    """Return a user's log shares for new messages, (C,), and those beside each training message, (n, C).

    A training message's own label is left out of what stands beside it. By time, only earlier messages count, later
    ones of them more. Otherwise all others count alike, as the nearest in time would tell of the message itself.

    Args:
        label, time: of the n training messages, by rising time if ``by_time``.
        classes: C.
        by_time: whether the split is by time.
        half_life: in days.
        recent: weight of the decayed shares beside the plain ones.
    """
    one = decayed(label, np.zeros(len(label)), classes, 1.0)
    if not by_time:
        total = one.sum(0)
        return log_shares(total), log_shares(total - one)
    plain = np.cumsum(np.vstack([np.zeros(classes), one]), 0)
    late = np.zeros_like(plain)
    for n, kept in enumerate(np.exp2(-np.diff(time, prepend=time[:1]) / (DAY * half_life))):
        late[n + 1] = late[n] * kept + one[n]  # from message to message: 2^(−age) of years would be 0
    return log_shares(plain[-1], late[-1], recent), log_shares(plain[:-1], late[:-1], recent)


def memory_scores(
    train: Ragged,
    label: Array,
    new: Ragged,
    classes: int,
    *,
    shrink: float = SHRINK,
    neighbours: int = NEIGHBOURS,
) -> tuple[Array, Array]:
    """Return naive Bayes' scores and the neighbours' votes for a user's new messages, each (q, C).

    Naive Bayes: the sum over a message's words of log((m + κ b) / (M + κ) / b), divided by the root of their number.
    Here m counts the word in the label's messages, M all words there, and b is the word's share in all of the user's
    messages, to which the label's share is shrunk. Votes: the cosine of the k most similar training messages, by label;
    words weigh log((1 + n) / (1 + messages with the word)).

    Args:
        train: word ids of n training messages; a word counts once a message.
        label: their labels, (n,).
        new: word ids of q messages.
        classes: C.
        shrink: κ.
        neighbours: k.
    """
    words = np.unique(train.values)
    known, _ = _present(train, words)
    asked, unknown = _present(new, words)
    one = np.zeros((len(label), classes), np.float32)
    one[np.arange(len(label)), label] = 1
    used = np.flatnonzero(one.any(0))
    bayes, votes = np.zeros((2, len(asked), classes))
    if not len(used):
        return bayes, votes
    count = known.T @ one[:, used]  # (words, labels used)
    each = count.sum(1, keepdims=True)
    total = count.sum(0)
    base = (each + 0.5) / (each.sum() + 1)
    bayes[:, used] = asked @ np.log((count / base + shrink) / (total + shrink))
    bayes[:, used] += unknown[:, None] * np.log(shrink / (total + shrink))
    bayes /= np.sqrt(np.maximum(1, asked.sum(1) + unknown))[:, None]
    weight = np.log((1 + len(label)) / (1 + known.sum(0)))
    known, asked = known * weight, asked * weight
    length = np.sqrt((asked**2).sum(1) + unknown * np.log(1 + len(label)) ** 2) + 1e-9
    alike = (asked / length[:, None]) @ (known / (np.sqrt((known**2).sum(1)) + 1e-9)[:, None]).T
    k = min(neighbours, len(label))
    least = np.partition(alike, -k, 1)[:, -k][:, None]
    votes[:] = np.where(alike >= least, alike, 0) @ one
    return bayes, votes


def _present(text: Ragged, words: Array) -> tuple[Array, Array]:
    """Return which of ``words`` each message has, float32 (messages, words), and how many others, (messages,)."""
    row = np.repeat(np.arange(len(text)), np.diff(text.offsets))
    pairs = np.unique(np.stack([row, text.values.astype(np.int64)], 1), axis=0)
    place = np.searchsorted(words, pairs[:, 1])
    inside = place < len(words)
    inside[inside] = words[place[inside]] == pairs[inside, 1]
    found = np.zeros((len(text), len(words)), np.float32)
    found[pairs[inside, 0], place[inside]] = 1
    return found, np.bincount(pairs[~inside, 0], minlength=len(text)).astype(np.float64)
