"""A contender's process: ``python -m benchmarks.contenders NAME --workload W1``, driven over standard input and output.

It says ``{"ready": true}`` once it is prepared. Then a line of JSON asks, and a line of JSON answers:
``{"turn": 3, "clients": [...]}`` → ``{"seconds": ..., "loss": ..., "facts": {...}}`` runs a round;
``{"save": PATH}`` → ``{"saved": PATH}`` writes the server's federated values as an npz file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import TextIO

import numpy as np
import torch

from benchmarks.contenders import Contender, Options

MODULES = {
    "plain": "plain",
    "plain_padded": "plain",
    "plain_two_processes": "two_processes",
    "flower": "flower",
    "pfl": "pfl",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--workload", default="W1")
    parser.add_argument("--cohort", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = Options(**vars(parser.parse_args()))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log, not between our answers
    torch.set_num_threads(options.threads)
    name = MODULES.get(options.contender, "ours")
    module = importlib.import_module(f"benchmarks.contenders.{name}")
    module.run(options, lambda contender: serve(contender, answers))


def serve(contender: Contender, answers: TextIO) -> None:
    """Answer requests until standard input ends."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "save" in request:
            np.savez(request["save"], **{n: v.cpu().numpy() for n, v in contender.state().items()})
            answer = {"saved": request["save"]}
        else:
            began = time.perf_counter()
            loss = contender.round(request["turn"], request["clients"])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            answer = {"seconds": seconds, "loss": loss, "facts": contender.facts}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
