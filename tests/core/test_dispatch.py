"""What looks at operations leaves torch's compiler where it is."""

from __future__ import annotations

import subprocess
import sys

import torch

from fedkeep.core.dispatch import EagerMode

RUN = """
import sys
import fedkeep
data = fedkeep.data.toy(users=4)
run = fedkeep.simulate(fedkeep.models.Linear(4, 3), fedkeep.methods.fedavg(), data, rounds=1, engine={engine!r})
assert run.engine == {engine!r}
print("torch._dynamo" in sys.modules)
"""


def test_a_run_does_not_load_the_compiler() -> None:
    """It takes seconds and 130 MB, in each process."""
    for engine in ("sequential", "vectorised"):
        code = RUN.format(engine=engine)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "False", done.stderr


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
