"""The winner of a comparison, saved, read again, and asked by people it knows, new people and strangers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import fedkeep
from examples import next_month
from examples.shell import fedkeep as fedkeep_
from fedkeep import methods
from fedkeep.models import MLP

METHODS = {
    "fine_tuned": methods.fine_tuned,
    "mixture": methods.mixture,
    "fedrep": methods.fedrep,
    "furl": methods.furl,
}


def main(epochs: int = 8) -> dict[str, dict[str, float]]:
    everyone = fedkeep.data.toy(users=24, examples=40)
    data, new = everyone.select(range(20)), everyone.select(range(20, 24))
    runs = {}
    for name, make in METHODS.items():
        torch.manual_seed(0)  # all begin alike
        model = MLP(features=4, classes=3)
        runs[name] = fedkeep.simulate(model, make(), data, epochs=epochs, cohort=10, evaluate_every=0)
    best = max(runs, key=lambda name: runs[name].evaluate("valid")["accuracy"])
    found = {name: {"known": run.evaluate()["accuracy"]} for name, run in runs.items()}
    for name, run in runs.items():  # any of them can be served; only the best needs to be
        run.fit(rows=new)
        found[name]["new"] = run.on(new).evaluate(clients=new.ids)["accuracy"]
        with tempfile.TemporaryDirectory() as folder:
            models = Path(folder) / "models"
            run.save(Path(folder) / "run")
            given = {"model": MLP(features=4, classes=3), "method": METHODS[name](), "data": data}
            again = fedkeep.load_run(Path(folder) / "run", **given)
            assert again.evaluate() == run.evaluate()
            again.export(models, [*data.ids, *new.ids])
            x = torch.tensor([[0.5, 1.0, -1.0, 0.0]])
            for client in (data.ids[3], new.ids[0]):
                module = MLP(features=4, classes=3)
                model = fedkeep.load_model(models, client, model=module, method=run.method)
                assert torch.equal(model(x=x), run.model(client)(x=x))
        if run.method.predict_shared is not None:  # of a stranger nothing is known
            found[name]["stranger"] = run.on(new).evaluate(clients=new.ids, stage="shared")["accuracy"]
    print(f"Best on valid: {best}", *found.items(), sep="\n")
    return found


COMMANDS = """
compare may.toml --methods fine_tuned,mixture,fedrep,furl --seeds 1 --no-references --out compared
personalize compared/runs/WINNER-0 --new new.csv
evaluate compared/runs/WINNER-0 --new later.csv
export compared/runs/WINNER-0 --client c3 --client c30 --out models
predict models --data later.csv --client c30 --out predicted.csv
"""
STRANGER = "predict models --data later.csv --shared --out strangers.csv"


def by_toml(winner: str) -> str:
    """Do the same by commands, with tables; return what was said, and what is predicted for a new person."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "may.toml").write_text(next_month.CONFIG.format(month="may", epochs=4))
        next_month.write(folder / "may.csv", range(20), 40, plans=3)
        next_month.write(folder / "new.csv", range(30, 32), 40, plans=3)
        next_month.write(folder / "later.csv", range(30, 32), 50, plans=3)
        said = [fedkeep_(folder, line.replace("WINNER", winner)) for line in COMMANDS.split("\n") if line]
        if winner != "fedrep":  # its shared part has no head
            fedkeep_(folder, STRANGER)
        print(said[2])
        return (folder / "predicted.csv").read_text()


if __name__ == "__main__":
    main()
    by_toml("fine_tuned")
