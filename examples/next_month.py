"""Next month's file: new rows and customers, one gone, a new plan. A run goes on, and each customer keeps its own part."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

from examples.shell import fedkeep
from fedkeep import load_run

CONFIG = """
[data]
reader = "table"
path = "{month}.csv"
user = "customer"
label = "plan"
features = ["calls", "data"]
[method]
kind = "fedrep"
[run]
epochs = {epochs}
"""


def write(path: Path, customers: range, rows: int, plans: int) -> None:
    """Write made customers' months: who calls much and surfs little takes another plan, as each sees it."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["customer", "calls", "data", "plan"])
        for customer in customers:
            draw = np.random.default_rng(customer)
            taste = draw.choice([-1, 1])
            for calls, data in draw.normal(size=(rows, 2)).round(3).tolist():
                plan = int(np.digitize(calls + taste * data, [-0.8, 0.8, 2.2][: plans - 1]))
                out.writerow([f"c{customer}", calls, data, ["basic", "plus", "gold", "max"][plan]])


COMMANDS = """
run may.toml --out may
run june.toml --continue-from may --out june
run may.toml --set method.kind=fedavg --out may-one
run june.toml --set method.kind=fedavg --continue-from may-one --out june-one
worth june --against june-one
compare june.toml --methods fedrep,fedavg --seeds 2 --out compared
export june --all --out models
predict models --data june.csv --out predicted.csv
"""


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "may.csv", range(20), 40, plans=3)
        write(
            folder / "june.csv", range(1, 24), 60, plans=4
        )  # c0 is gone, c20 to c23 are new, and so is "max"
        for month, epochs in (("may", 10), ("june", 5)):
            (folder / f"{month}.toml").write_text(CONFIG.format(month=month, epochs=epochs))
        for command in COMMANDS.strip().splitlines():
            print(f"$ fedkeep {command}", fedkeep(folder, command), sep="\n")
        may, june = (load_run(folder / month, data_folder=folder) for month in ("may", "june"))
        new = june.predict("c22", {"x": [[2.0, 1.0]]})[0].tasks[0].value
        predicted = (folder / "predicted.csv").read_text().splitlines()
        print(june.continues, f"c22, who is new: {new}", *predicted[:3], sep="\n")
        return {
            "may": may.evaluate()["accuracy"],
            "june": june.evaluate()["accuracy"],
            "one model": load_run(folder / "june-one", data_folder=folder).evaluate()["accuracy"],
            "predicted": len(predicted) - 1,
        }


if __name__ == "__main__":
    main()
