"""Convolution, ReLU and max-pool as one layer against the three of torch, and whole steps of two networks.

    python -m benchmarks.cnn

For each shape of a layer: milliseconds of forward + backward on one core, torch's, their ratio, and the fraction of
the multiply-add peak that the operations needed reach: of four places only the one that the pooled value comes from,
and where the ReLU is not 0, has a gradient. For each network: a step of forward, backward and Adam, as a researcher
writes it and by fedkeep. The contenders take turns; times are those of the processor, the least of all turns, as other
processes only ever add; ratios are the median of those within a turn.

Claims: a step of W3's network is 2 × as fast as the plain one on one core with the default allocator, a step of
CifarCNN 2 × as fast.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import ratio
from benchmarks.models import CNN as PlainW3  # noqa: N811
from fedkeep import adam
from fedkeep.core.allocator import tune_allocator
from fedkeep.kernels import native
from fedkeep.kernels.native import status
from fedkeep.models import CifarCNN
from fedkeep.nn import ConvPool, Linear

LAYERS = {  # images, channels, output channels, padding, side
    "W3, first": (10, 3, 32, 2, 32),
    "W3, second": (10, 32, 64, 2, 16),
    "CifarCNN, first": (10, 3, 6, 0, 32),
    "CifarCNN, second": (10, 6, 16, 0, 14),
    "FashionCNN, first": (10, 1, 6, 0, 28),
    "FashionCNN, second": (10, 6, 12, 0, 12),
}
KERNEL, TURNS, RATE = 5, 40, 1e-4
CLAIMED = {"W3": 2.0, "CifarCNN": 2.0}


class W3(nn.Module):
    """W3's network of fedkeep's layers; parameters as the plain one's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvPool(3, 32, KERNEL, 2)
        self.conv2 = ConvPool(32, 64, KERNEL, 2, flat=True)
        self.fc1 = Linear(64 * 8 * 8, 512, relu=True)
        self.out = nn.Linear(512, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, 10) for images (B, 3, 32, 32)."""
        logits: Tensor = self.out(self.fc1(self.conv2(self.conv1(image))))
        return logits


class PlainCifar(nn.Module):
    """CifarCNN as a researcher writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, KERNEL), nn.Conv2d(6, 16, KERNEL)
        self.fc1, self.fc2, self.out = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
        self.drop = nn.Dropout(0.5)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, 10) for images (B, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        logits: Tensor = self.out(F.relu(self.fc2(self.drop(F.relu(self.fc1(x))))))
        return logits


def processor_times(contenders: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return seconds of the processor of each contender, turn by turn; all compute on one thread."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, TURNS):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            contenders[name]()
            if turn >= 0:
                seconds[name].append(time.process_time() - began)
    return seconds


def layer(name: str) -> None:
    """Measure one shape of the layer and print its line."""
    images, channels, outputs, padding, side = LAYERS[name]
    torch.manual_seed(0)
    ours = ConvPool(channels, outputs, KERNEL, padding)
    first = channels < 6  # images themselves need no gradient
    x = torch.rand(images, channels, side, side) * 2 - 1
    theirs_x = x.clone().requires_grad_(not first)
    ours_x = x.contiguous(memory_format=torch.channels_last).requires_grad_(not first)

    def theirs() -> Tensor:
        return F.max_pool2d(F.relu(F.conv2d(theirs_x, ours.weight, ours.bias, padding=padding)), 2)

    def both(run: Callable[[], Tensor], source: Tensor) -> Callable[[], object]:
        wanted = [*ours.parameters(), *([] if first else [source])]

        def work() -> object:
            y = run()
            return torch.autograd.grad(y, wanted, torch.ones_like(y))

        return work

    ways = {"ours": both(lambda: ours(ours_x), ours_x), "torch": both(theirs, theirs_x)}
    seconds = processor_times(ways)
    y = ours(x)
    places = 2 * 4 * y.numel() * channels * KERNEL**2  # operations of the forward pass
    live = float((y > 0).sum()) / y.numel() / 4
    operations = places * (1 + live * (1 if first else 2))
    best = {way: min(found) for way, found in seconds.items()}
    share = operations / best["ours"] / max(native.peak() for _ in range(20))
    print(
        f"{name:20} {best['ours'] * 1e3:7.3f} ms   torch {best['torch'] * 1e3:7.3f} ms   "
        f"{ratio(seconds, 'torch', 'ours')['median']:5.1f} x   {share:4.0%} of peak"
    )


def network(name: str) -> float:
    """Measure a step of a network in this process, print its line and return the ratio."""
    torch.manual_seed(0)
    plain, ours = (PlainW3(), W3()) if name == "W3" else (PlainCifar(), CifarCNN(10))
    ours.load_state_dict(plain.state_dict())
    image = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8)
    floats = image.float() / 127.5 - 1
    image = image if name == "CifarCNN" else floats
    label = torch.randint(0, 10, (10,))
    theirs = torch.optim.Adam(plain.parameters(), lr=RATE)
    params = dict(ours.named_parameters())
    optimizer = adam(RATE)
    state = optimizer.init()

    def researcher() -> None:
        theirs.zero_grad()
        F.cross_entropy(plain(floats), label).backward()
        theirs.step()

    def fedkeep() -> None:
        found = torch.autograd.grad(F.cross_entropy(ours(image), label), list(params.values()))
        optimizer.update(params, dict(zip(params, found, strict=True)), state)

    def several(step: Callable[[], None]) -> Callable[[], None]:
        return lambda: [step() for _ in range(5)] and None

    seconds = processor_times({"plain": several(researcher), "fedkeep": several(fedkeep)})
    best = {way: min(found) / 5 * 1e3 for way, found in seconds.items()}
    found = ratio(seconds, "plain", "fedkeep")
    print(
        f"{name:20} {best['fedkeep']:7.3f} ms   plain {best['plain']:7.3f} ms   {found['median']:5.1f} x   "
        f"({found['low']:.1f} to {found['high']:.1f})",
        flush=True,
    )
    return found["median"]


def main() -> int:
    """Print all lines; fail if a claim fails."""
    torch.set_num_threads(1)
    if not status().native:
        print(status())
        return 0
    if len(sys.argv) > 1:  # a network in a process of its own: the allocator is tuned for good
        if "keep" in sys.argv:
            tune_allocator()
        return network(sys.argv[1]) < CLAIMED[sys.argv[1]] and "keep" not in sys.argv
    print(f"{status()}; peak of one core: {max(native.peak() for _ in range(50)) / 1e9:.0f} GFLOP/s")
    for name in LAYERS:
        layer(name)
    failed = []
    for name in CLAIMED:
        for setting in ((), ("keep",)):
            print("freed memory kept, for both:" if setting else "default allocator, for both:", flush=True)
            command = [sys.executable, "-m", "benchmarks.cnn", name, *setting]
            if subprocess.run(command).returncode:
                failed.append(name)
    assert not failed, f"steps slower than claimed {CLAIMED}: {failed}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
