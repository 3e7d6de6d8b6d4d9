"""What looks at operations leaves torch's compiler where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from fedkeep.core.dispatch import EagerMode

RUN = """
import sys
import fedkeep
from fedkeep.engines.vectorised.costs import step_cost
from tests.tiny import Logits, classes, job
for engine in ("sequential", "vectorised", "auto"):
    data = fedkeep.data.toy(users=4)
    run = fedkeep.simulate(fedkeep.models.Linear(4, 3), fedkeep.methods.fedavg(), data, rounds=1, engine=engine)
    assert engine in (run.engine, "auto")
assert step_cost(job(Logits(), fedkeep.methods.fedavg(), classes(counts=(4, 4), kind="f4")), 0).flops > 0
print({"torch._dynamo", "sympy"} & set(sys.modules))
"""
"""``step_cost`` is how ``auto`` chooses for larger runs than this."""


def test_a_run_loads_neither_torchs_compiler_nor_sympy() -> None:
    """They take seconds and 130 MB, in each process."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_mode_sees_operations_that_are_not_compiled() -> None:
    class Seen(EagerMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: object = None
        ) -> object:  # type: ignore[type-arg, override]
            names.append(str(func))
            return func(*args)  # type: ignore[operator]

    names: list[str] = []
    with Seen():
        torch.ones(2) + torch.ones(2)
    assert "aten.add.Tensor" in names
