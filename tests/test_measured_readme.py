"""README's numbers are those of the files in results/."""

from __future__ import annotations

import re

from benchmarks import claims
from fedkeep.methods import METHODS
from tests.test_measured import README, SPEEDS, check, mean, percent, results


def test_the_readme_says_what_was_measured() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())

    def check_line(pattern: str, *numbers: float) -> None:
        found = re.search(pattern, text)
        assert found, pattern
        check(pattern, " ".join(found.groups()), list(numbers))

    films, images = "MovieLens-100K, ratings", "CIFAR-10, 5 × 500, p = 0.8, clean protocol"
    rmse = [
        mean("natural-users", films, name, "rmse")
        for name in ("FURL", "FedAvg", "Local", "FedAvg + fine-tuning")
    ]
    right = {
        n: 100 * mean("moe-methods-medium", images, n)
        for n in ("FedRep", "FedAvg", "Local", "Mixture", "Fine-tuned")
    }
    check_line(r"RMSE on MovieLens-100K: (\S+); FedAvg (\S+), each alone (\S+) \|", *rmse[:3])
    check_line(
        r"a client: (\S+) %; FedAvg (\S+) %, each alone (\S+) %",
        *(right[n] for n in ("FedRep", "FedAvg", "Local")),
    )
    check_line(r"CIFAR-10 as above: (\S+) %", right["Mixture"])
    check_line(
        r"MovieLens (\S+), level with `furl`, which keeps a vector each; CIFAR-10 (\S+) %",
        rmse[3],
        right["Fine-tuned"],
    )
    reviews = {r["method"]: r for r in results("kteps-table3") if r["metric"] == "accuracy_ap" and r["value"]}
    check_line(
        r"goods: (\S+) %; all reviews in one place (\S+) %",
        *(100 * reviews[name]["value"] for name in ("FedAvg", "FS")),
    )
    check_line(
        r"FedAvg: (\S+ ± \S+) against (\S+ ± \S+) %", *percent(reviews["KTEPS"]), *percent(reviews["FedAvg"])
    )
    table2 = [r for r in results("moe-table2") if "paper's protocol" in r["scene"] and r["published"]]
    check_line(r"within (\S+) points", max(100 * abs(r["value"] - r["published"]) for r in table2))
    rows = [
        claims.best(results(name), *case)
        for name in SPEEDS
        for case in (("W1", 10), ("W1", 40), ("W1", 160), ("W3", 5), ("W4", 5))
    ]
    ratios = [
        [row["ratio_to_plain"] for row in rows if row and row["workload"] in names]
        for names in (("W1",), ("W3", "W4"))
    ]
    check_line(
        r"is (\S+) to (\S+) times .* LSTM .* convolutions (\S+) to (\S+) times\. With",
        *(edge(of) for of in ratios for edge in (min, max)),
    )
    assert f"has all {len(METHODS)}." in text
