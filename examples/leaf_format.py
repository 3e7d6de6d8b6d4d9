"""A file in LEAF's format, as FEMNIST has it: from the folder to a run.

``python -m examples.leaf_format``. A user writes `CONFIG`, or lets ``fedkeep start`` write it; the file is made here.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from examples.shell import fedkeep
from fedkeep.experiments.load import load_run

CONFIG = """
[data]
reader = "leaf"
folder = "femnist"
[model]
kind = "cnn"
[method]
kind = "fedrep"
optimizer = { kind = "adam", learning_rate = 0.003 }
[run]
epochs = 4
"""


def write(folder: Path, writers: int = 6, each: int = 40) -> None:
    """Write FEMNIST's layout: 784 numbers an image, 0 black and 1 white, train and test apart, a user a writer."""
    draw = np.random.default_rng(0)
    for part, count in (("train", each), ("test", each // 4)):
        data = {}
        for writer in range(writers):
            labels = draw.integers(0, 4, count)
            images = np.ones((count, 28, 28))
            for image, label in zip(images, labels, strict=True):
                place = 3 + 6 * ((label + writer) % 4)  # each writer has signs of its own
                image[place : place + 3, 4:24] = draw.uniform(0, 0.4, (3, 20)).round(2)
            data[f"f{writer:04}_00"] = {
                "x": (np.rint(images.reshape(count, 784) * 255) / 255).tolist(),
                "y": labels.tolist(),
            }
        content = {"users": list(data), "num_samples": [count] * writers, "user_data": data}
        file = folder / f"femnist/{part}/all_data_0_niid_0_keep_0_{part}_9.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content))


def main() -> float:
    """Return the accuracy on the writers' test images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        (folder / "femnist.toml").write_text(CONFIG)
        print(fedkeep(folder, "run femnist.toml --out run"))
        return load_run(folder / "run", data_folder=folder).evaluate()["accuracy"]


if __name__ == "__main__":
    main()
