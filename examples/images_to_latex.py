"""From a folder of images to a table in LaTeX: a ResNet of one's own, batch normalisation or the head kept private.

``python -m examples.images_to_latex``. What a user writes is `NETWORK`, `CONFIG` and two commands; the images are made here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from examples.shell import fedkeep

NETWORK = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return (x + self.last(self.second(self.norm(self.first(x)).relu()))).relu()


class ResNet(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, 2, 1), Block(8), Block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(32, classes)

    def forward(self, image):
        return self.head(self.body(image))
"""
CONFIG = """
[data]
reader = "image_folder"
folder = "photos"
levels = "client/class"
[model]
kind = "net:ResNet"
[method]
kind = "fedbn"
optimizer = { kind = "adam", learning_rate = 0.003 }
batch_size = 8
[run]
epochs = 8
"""


def write(folder: Path, each: int = 20) -> None:
    """Write what sites photographed: one of three bands of light, in a tint of the site's own."""
    draw = np.random.default_rng(0)
    for site in range(4):
        for kind, name in enumerate(("low", "middle", "high")):
            for number in range(each):
                image = draw.normal(30 + 50 * site, 12, (12, 12, 3))
                image[4 * kind : 4 * kind + 4] += 50
                path = folder / f"photos/site-{site}/{name}/{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path)


def main(each: int = 20) -> str:
    """Return the table in LaTeX."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, each)
        (folder / "net.py").write_text(NETWORK)
        (folder / "photos.toml").write_text(CONFIG)
        fedkeep(folder, "compare photos.toml --methods fedbn,fedrep,fedavg --seeds 2 --out compared")
        return (folder / "compared/tables/comparison.tex").read_text()


if __name__ == "__main__":
    print(main())
