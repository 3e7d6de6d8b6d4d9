"""Next month's file: new rows and customers, one gone, a new plan. A run goes on, and each customer keeps its own part."""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import numpy as np

import fedkeep
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run

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


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "may.csv", range(20), 40, plans=3)
        write(
            folder / "june.csv", range(1, 24), 60, plans=4
        )  # c0 is gone, c20 to c23 are new, and so is "max"
        may = run_config(
            parse_config(CONFIG.format(month="may", epochs=10)), folder=folder, out=folder / "may"
        )
        config = parse_config(CONFIG.format(month="june", epochs=5))
        run_config(config, folder=folder, out=folder / "june", continue_from=folder / "may", tell=print)
        june = load_run(folder / "june", data_folder=folder)
        june.export(folder / "models")
        asked = fedkeep.load_encoding(folder / "models").batch(x=[[2.0, 1.0]])
        print("c22, who is new:", june.predict("c22", {"x": [[2.0, 1.0]]})[0].tasks[0].value)
        assert fedkeep.load_model(folder / "models", "c22")(**asked).shape == (1, 4)
        found = {"may": may.evaluate()["accuracy"], "june": june.evaluate()["accuracy"]}
        print(june.continues, found, sep="\n")
        return found


if __name__ == "__main__":
    main()
