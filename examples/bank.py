"""A bank's table with dates, categories and holes, by ``fedkeep start`` alone: a user writes no line.

``python -m examples.bank``; the table is made here, as a spreadsheet of another country would save it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from examples.shell import fedkeep
from fedkeep.experiments.load import load_run


def write(file: Path, branches: int = 8, each: int = 60) -> None:
    """Write customers of branches with semicolons, decimal commas, dates, categories and empty cells."""
    draw = np.random.default_rng(0)
    lines = ["branch_id;opened;job;income;children;balance;default"]
    for branch in range(branches):
        for _ in range(each):
            day = np.datetime64("2015-01-01") + int(draw.integers(0, 3000))
            job, income = draw.choice(["clerk", "nurse", "driver", "none"]), draw.lognormal(7, 0.5)
            balance = draw.normal(2000, 1500)
            risk = 1.5 * (job == "none") - balance / 1500 + (branch % 3 - 1) * 1.5 + draw.normal() / 2
            cells = [f"b{branch}", str(day), job, f"{income:.2f}", str(draw.integers(0, 4)), f"{balance:.2f}"]
            for column in (1, 2, 3):
                if draw.random() < 0.05:
                    cells[column] = ""
            lines.append(";".join([*cells, "yes" if risk > 0 else "no"]).replace(".", ","))
    file.write_text("\n".join(lines) + "\n")


def main() -> float:
    """Return the AUC on the branches' test rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "bank.csv")
        print(fedkeep(folder, "start bank.csv"))
        print(fedkeep(folder, "run bank.toml --out run"))
        fedkeep(folder, "export run --all --out models")
        print(fedkeep(folder, "predict models --data bank.csv --out predicted.csv"))
        assert len((folder / "predicted.csv").read_text().splitlines()) == 1 + 8 * 60
        return load_run(folder / "run", data_folder=folder).evaluate()["auc"]


if __name__ == "__main__":
    main()
