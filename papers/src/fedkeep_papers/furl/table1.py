"""FURL, Table 1: how many messages and users the data have."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.data import FederatedData
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.furl.scenes import SCENES, read, result_name, specs_of
from fedkeep_papers.kit.results import over_seeds, write_results

PUBLISHED = {
    "Sticker": {
        "training_samples": 750e3,
        "evaluation_samples": 94e3,
        "test_samples": 96e3,
        "users": 3.4e3,
        "mean_samples_of_a_user": 274.0,
        "classes": 2.0,
    },
    "Subreddit": {
        "training_samples": 752e3,
        "evaluation_samples": 94e3,
        "test_samples": 96e3,
        "users": 3.8e3,
        "mean_samples_of_a_user": 248.0,
        "classes": 256.0,
    },
}


MINUTES = 10


def statistics(data: FederatedData) -> dict[str, float]:
    """Return the table's numbers of a data set."""
    samples = {s: sum(data.count(c, s) for c in range(len(data))) for s in ("train", "valid", "test")}
    return {
        "training_samples": samples["train"],
        "evaluation_samples": samples["valid"],
        "test_samples": samples["test"],
        "users": len(data),
        "mean_samples_of_a_user": sum(samples.values()) / len(data),
        "classes": len(np.unique(np.asarray(data.columns["label"]))),
        **(near_training(data) if "time" in data.columns else {}),
    }


def near_training(data: FederatedData) -> dict[str, float]:
    """Return how many test examples lie within ten minutes of a training example of the same user, and of how many of
    these the nearest one in time (the earlier of two) has the same label.
    """
    time, label = (np.asarray(data.columns[name]) for name in ("time", "label"))
    near = same = 0
    for client in range(len(data)):
        train, test = (np.asarray(data.rows(client, split), np.int64) for split in ("train", "test"))
        if not len(train):
            continue
        train = train[np.argsort(time[train], kind="stable")]
        after = (
            np.searchsorted(time[train], time[test]).clip(1, len(train) - 1) if len(train) > 1 else test * 0
        )
        around = np.stack([np.maximum(after - 1, 0), after])
        gaps = np.abs(time[train][around] - time[test])
        nearest = train[np.take_along_axis(around, gaps.argmin(0)[None], 0)[0]]
        close = gaps.min(0) <= MINUTES * 60
        near += int(close.sum())
        same += int((close & (label[nearest] == label[test])).sum())
    return {
        "test_samples_within_ten_minutes_of_training": near,
        "of_these_with_the_label_of_the_nearest": same,
    }


def table1(request: Request) -> Path:
    """Write the statistics of the scenes' data, as the scale's configurations read them; nothing is trained.

    Raises:
        DataError: the folder of data is not named.
    """
    rows = []
    for scene in (s for s in SCENES if s.stands_for in PUBLISHED):
        (_, seed), *_ = specs_of(scene, request, Path(), {})
        found, known = statistics(read(scene, request)), PUBLISHED[scene.stands_for]
        rows += [
            over_seeds(
                scene.name,
                scene.stands_for,
                metric,
                {seed: float(value)},
                published=known.get(metric),
                scale=request.scale,
            )
            for metric, value in found.items()
        ]
    text = "The published numbers are of the paper's data, in whose place these stand; see `furl-table3`."
    name = result_name("furl-table1", request.scale)
    return write_results(request.out, name, rows, title="FURL, Table 1: the data", preamble=text)[1]
