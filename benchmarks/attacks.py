"""What keeping parameters home is worth against attackers, and what it is not: FURL, KTEPS and the mixture, small.

    python -m benchmarks.attacks --data DIR [--only furl] [--shadows 4]

Each is attacked as ``fedkeep attack`` does it: FURL and KTEPS on generated text, the mixture on Fashion-MNIST of DIR,
and FURL on real text, zulip_channels of DIR.
Beside it: the private vector from FURL's upload after one local step, and after six.

Claims: with FURL's split the private part names nobody, and one local step gives the server every user's vector to
within rounding, six its direction. Of a sum under ε = 1 the cosine's interval reaches down to ``seen_through_noise``.
Writes ``results/attacks.json`` and ``.md``; what ``--only`` leaves out stays as it is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, processor, write
from fedkeep.attacks import place_of, vector_in_upload
from fedkeep.experiments.attack import Attacked, AttackRequest, attack
from fedkeep.experiments.attack_measures import against
from fedkeep.experiments.attack_scenes import STEP, AttackScene, multiplier
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import Config, parse_config
from fedkeep.report.attacks import TITLES, AttackFinding, plain, sentences, table
from fedkeep.report.text_tables import to_markdown

TEXT = 'data = { reader = "many_user_text", users = %d, examples = 40, classes = 6, seed = 0 }\n'
CONFIGS = {
    "furl": TEXT % 24
    + """
model = { kind = "document", user_dim = 16, embedding_dim = 16, hidden = 16, mlp = 32, pool = "max" }
[method]
kind = "furl"
private = "user"
batch_size = 8
clip_norm = 5.0
optimizer = { learning_rate = 0.2, rates = { user = 1.0 } }
server_optimizer = { momentum = 0.9 }
[run]
epochs = 8
cohort = 6
engine = "sequential"
""",
    "kteps": TEXT % 16
    + """
model = { kind = "text_classifier", embedding_dim = 16, hidden = 16 }
[method]
kind = "kteps"
epochs = 2
batch_size = 8
optimizer = { learning_rate = 0.05, momentum = 0.9 }
[run]
rounds = 6
cohort = 8
engine = "sequential"
""",
    "mixture": """
[data]
reader = "fashion_mnist"
partition = { kind = "majority", clients = 5, p = 0.8, train = 60, valid = 20, test = 60 }
[model]
kind = "mixture_of_experts"
global_expert = { kind = "fashion_cnn" }
local_expert = { kind = "fashion_cnn" }
gate = { kind = "gate", network = { kind = "fashion_cnn", classes = 1 } }
[method]
kind = "mixture"
epochs = 3
batch_size = 10
optimizer = { kind = "adam", learning_rate = 1e-3 }
[run]
rounds = 8
cohort = 2
engine = "sequential"
""",
    "zulip": """
[data]
reader = "zulip_channels"
tokens = "words"
vocabulary = 2000
max_length = 40
limit_users = 24
[model]
kind = "bag_of_words"
user_dim = 8
embedding_dim = 16
mlp = 32
[method]
kind = "furl"
private = "user"
batch_size = 32
optimizer = { learning_rate = 0.5 }
server_optimizer = { kind = "adam", learning_rate = 0.03 }
[run]
rounds = 20
cohort = 8
engine = "sequential"
""",
}
INTRODUCTION = """Small runs, one seed; intervals are over clients, or over sums where clients share one.
`python -m benchmarks.attacks --data DIR`. What each attacker knows and sees stands in the functions of
`fedkeep.attacks`, and on the page of `fedkeep attack --out DIR`.

Another processor rounds otherwise. What is found to within rounding, and images, which many steps of an optimiser give
back, then differ: with AVX2 in the place of AVX-512 the mixture's plain PSNR is 15.3 dB for 14.9, and FURL's median
relative error after one step 3.8e-07 for 4.4e-07. Beside each run stands which processor attacked it.
"""


def steps(config: Config, numbers: tuple[int, ...] = (1, 6)) -> dict[str, Any]:
    """Return how near FURL's private vector is that one upload gives, after so many local steps of SGD on 8 texts."""
    run = run_config(config, progress=False)
    scene = AttackScene(run, [str(i) for i in run.data.ids], 8)
    client = scene.clients[0]
    place = place_of(
        scene.net,
        {**scene.known(), **scene.first[client].before},
        scene.batch(client, data=scene.one),
        "user",
    )
    assert place is not None
    found: dict[str, Any] = {"learning_rate": STEP}
    for number in numbers:
        seen = scene.local_steps(number, 8)
        true = {c: o.before["user"] for c, o in scene.first.items()}
        vectors = {s.clients[0]: vector_in_upload(s, *place) for s in seen}
        errors = [float((v - true[c]).norm() / true[c].norm()) for c, v in vectors.items()]
        cosine, guess = against(vectors, true)
        found[str(number)] = {
            "median_relative_error": float(np.median(errors)),
            "largest_relative_error": max(errors),
            "cosine": cosine.mean,
            "low": cosine.low,
            "high": cosine.high,
            "guess": guess,
        }
    return found


def seen_through_noise(size: int, multiplier: float) -> float:
    """Return the largest mean cosine with a private vector that a clipped client can show in a noisy sum.

    With b the seen change of the bias as a unit vector, the attacker's estimate is ΔWᵀb = u (b_k · b) + noise and
    others' vectors. The client's own part is at most C long, as (ΔW_k, b_k) is clipped to C, and the noise has the
    deviation z C in each of d directions: E cos ≤ 1 / √(1 + (d − 1) z²).

    Args:
        size: d, of the vector.
        multiplier: z.
    """
    return float((1 + (size - 1) * multiplier**2) ** -0.5)


def check(found: list[AttackFinding], local: dict[str, Any]) -> None:
    """Raise AssertionError unless the claims hold."""
    by = {(f.measure, f.protection): f for f in found}
    alone = "named right by the private part alone"
    assert by[alone, "plain"].verdict == "found", by[alone, "plain"]
    assert by[alone, "split"].verdict == "nothing", by[alone, "split"]
    noisy = by["cosine, one local step", "dp ε=1"]
    most = seen_through_noise(16, multiplier(1.0, rate=6 / 24, rounds=32, delta=0.1 / 24))
    assert noisy.low is not None, noisy
    assert noisy.low <= most, (noisy, most)
    assert local["1"]["median_relative_error"] < 1e-5, local
    assert local["6"]["cosine"] > 0.98, local


def drop(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a finding is made of."""
    return {k: v for k, v in found.items() if k != "verdict"}


def attacked_on(processors: dict[str, str]) -> list[str]:
    """Return a line for each processor, given the processor of each attack."""
    titles: dict[str, list[str]] = {}
    for title, name in processors.items():
        titles.setdefault(name, []).append(title)
    return [f"attacked on {name}: {'; '.join(each)}" for name, each in titles.items()]


def page(cells: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# What keeping parameters home is worth against attackers, and what it is not\n", INTRODUCTION]
    for name, cell in cells.items():
        found = [AttackFinding(**drop(f)) for f in cell["findings"]]
        lines.append(f"## {name}\n")
        lines += [f"- {line}" for line in (*cell["settings"], *attacked_on(cell["processors"]))]
        for title, said in zip(("Worth", "Not worth"), sentences(found), strict=True):
            lines += [f"\n**{title}**\n", *(f"- {line}" for line in said or ["nothing"])]
        if "local_steps" in cell:
            lines.append("\n**The private vector from one upload, by local steps of SGD**\n")
            for number in ("1", "6"):
                one = cell["local_steps"][number]
                lines.append(
                    f"- {number}: cosine {one['cosine']:.4f}, median relative error {one['median_relative_error']:.2g}"
                )
        lines.append("\n" + to_markdown(table(found)))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Attack, and write what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", choices=tuple(CONFIGS), action="append")
    parser.add_argument("--attacks", default=",".join(TITLES), help="others stay as they are in the results")
    parser.add_argument("--shadows", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "attacks.json"
    cells = json.loads(path.read_text(encoding="utf-8"))["attacked"] if path.exists() else {}
    for name in given.only or CONFIGS:
        config = parse_config(CONFIGS[name], name)
        asked = AttackRequest(attacks=tuple(given.attacks.split(",")), shadows=given.shadows)
        result: Attacked = attack(config, asked, folder=given.data, say=lambda t: print(t, flush=True))
        titles = [TITLES[key] for key in asked.attacks]
        old = cells.get(name, {"findings": [], "commits": {}, "processors": {}})
        kept = [f for f in old["findings"] if f["attack"] not in titles]
        order = list(TITLES.values())
        cells[name] = {
            "commits": {**old["commits"], **dict.fromkeys(titles, commit())},
            "processors": {**old["processors"], **dict.fromkeys(titles, processor())},
            "seed": config.seed,
            "config": CONFIGS[name],
            "settings": result.settings,
            "findings": sorted([*kept, *plain(result.findings)], key=lambda f: order.index(f["attack"])),
            **({"local_steps": old["local_steps"]} if "local_steps" in old else {}),
        }
        if name == "furl" and "upload" in asked.attacks:
            cells[name]["local_steps"] = steps(config)
            print(cells[name]["local_steps"], flush=True)
        write("attacks", {"attacked": cells}, page(cells))
        if name == "furl":
            check([AttackFinding(**drop(f)) for f in cells[name]["findings"]], cells[name]["local_steps"])


if __name__ == "__main__":
    main()
