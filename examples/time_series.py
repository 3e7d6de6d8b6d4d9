"""Series of several shops, split by date: what comes before trains, what comes after tests.

``python -m examples.time_series``. A user writes `CONFIG`; the table is made here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from examples.shell import fedkeep
from fedkeep.experiments.load import load_run

CONFIG = """
[data]
reader = "table"
path = "sales.csv"
user = "shop"
label = "sales"
time = "day"
features = ["weekday", "offer", "yesterday"]
task = "regression"
[data.split]
order = "chronological"
[method]
kind = "fedrep"
[run]
epochs = 15
"""


def write(file: Path, shops: int = 6, days: int = 200) -> None:
    """Write a row a shop and day, in no order: each shop has a level and a week of its own."""
    draw = np.random.default_rng(0)
    rows = []
    for shop in range(shops):
        before = 100.0
        for number in range(days):
            day, offer = np.datetime64("2024-01-01") + number, int(draw.integers(0, 2))
            sales = 60 + 15 * shop + 30 * offer * (shop % 2) + 12 * ((number + shop) % 7 > 4) + 0.2 * before
            sales += draw.normal(0, 3)
            weekday = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"][number % 7]
            rows.append(f"shop{shop},{day},{weekday},{offer},{before:.1f},{sales:.1f}")
            before = sales
    draw.shuffle(rows)
    file.write_text("\n".join(["shop,day,weekday,offer,yesterday,sales", *rows]) + "\n")


def main() -> dict[str, float]:
    """Return the RMSE on the last days of each shop, and the share of test days that lie before a day of training."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "sales.csv")
        (folder / "sales.toml").write_text(CONFIG)
        print(fedkeep(folder, "run sales.toml --out run"))
        run = load_run(folder / "run", data_folder=folder)
        time = np.asarray(run.data.columns["time"])
        early = [
            (time[run.data.rows(client, "test")] < time[run.data.rows(client, "train")].max()).mean()
            for client in range(len(run.data))
        ]
        return {"rmse": run.evaluate()["rmse"], "early": float(max(early))}


if __name__ == "__main__":
    print(main())
