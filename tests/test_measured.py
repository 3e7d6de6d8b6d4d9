"""The numbers of the page of what was measured are those of the files in results/."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import claims, how_far
from benchmarks.own_clock import over
from tests.documents import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+)?")
SPEEDS = ("speed", "speed-zen4", "speed-avx2")
MESSAGES = "zulip_channels"
FURL = {"Personalized FL, ours": "Personalized FL, best recipe"}


def results(name: str) -> Any:
    """Return the rows of a table, without those of scenes whose data are not there."""
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    if not isinstance(content, list):
        return content
    return [row for row in content if not str(row.get("scene", "")).endswith("no data here")]


def text_of(page: Path) -> str:
    """Return a page in one line, its links as their texts."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page.read_text(encoding="utf-8"))
    return " ".join(text.split())


def check(where: str, cell: str, numbers: list[float]) -> None:
    """Check that a text shows these numbers and no others, rounded to the digits that it shows."""
    shown = NUMBER.findall(cell)
    assert len(shown) == len(numbers), f"{where}: {cell!r} should show {numbers}"
    for text, number in zip(shown, numbers, strict=True):
        digits = len(text.partition(".")[2])
        off = abs(float(text.replace("−", "-").replace(",", "")) - number)
        assert off <= 0.5 * 10**-digits + 1e-9, f"{where}: {cell!r} shows {text}, measured was {number:.4g}"


def check_line(text: str, pattern: str, *numbers: float) -> None:
    """Check the numbers that a pattern's groups find."""
    found = re.search(pattern, text)
    assert found, pattern
    check(pattern, " ".join(found.groups()), list(numbers))


def percent(row: dict[str, Any]) -> list[float]:
    """Return mean and, where there is one, deviation in percent."""
    return [100 * row["value"], *([100 * row["std"]] if row["std"] is not None else [])]


def mean(file: str, scene: str, method: str, metric: str = "") -> float:
    """Return the mean of one method on a scene of a results file."""
    (row,) = [
        r for r in results(file) if (r["scene"], r["method"]) == (scene, method) and metric in r["metric"]
    ]
    return float(row["value"])


def speedups() -> list[float]:
    """Return the least and the greatest speed over a plain loop, of the LSTM and of convolutions."""
    cases = (("W1", 10), ("W1", 40), ("W1", 160), ("W3", 5), ("W4", 5))
    rows = [claims.best(results(name), *case) for name in SPEEDS for case in cases]
    ratios = [
        [row["ratio_to_plain"] for row in rows if row and row["workload"] in names]
        for names in (("W1",), ("W3", "W4"))
    ]
    return [edge(of) for of in ratios for edge in (min, max)]


PAGE = text_of(DOCS / "measured.md")
NATURAL = {
    "MovieLens-100K, RMSE": ("MovieLens-100K, ratings", "rmse", 1),
    "InstEval, RMSE": ("InstEval, ratings", "rmse", 1),
    "MovieLens-100K, last film among the first ten of 100": (
        "MovieLens-100K, the last film among 100",
        "hr10",
        100,
    ),
    "Shakespeare by role, next character": ("Shakespeare, the next character", "accuracy", 100),
}


@pytest.mark.parametrize("label", NATURAL)
def test_natural_users(label: str) -> None:
    scene, metric, times = NATURAL[label]
    methods = ("FURL", "FedAvg", "Local", "FedAvg + fine-tuning")
    wanted = (times * mean("natural-users", scene, name, metric) for name in methods)
    check_line(PAGE, rf"\| {label} \|(.*?\|.*?\|.*?\|.*?)\|", *wanted)


def test_a_mixed_model_stands_beside_furl() -> None:
    (ours,) = [mean("natural-users", "InstEval, ratings", "FURL", "rmse")]
    known = next(
        r["published"]
        for r in results("natural-users")
        if r["scene"] == "InstEval, ratings" and r["published"]
    )
    check_line(PAGE, r"error is (\S+) % above", 100 * (ours / known - 1))


FILMS = {
    "PFedRec, drawn as published": ("PFedRec, draws as published", "sampled", "full"),
    "PFedRec, what is tested may be drawn": ("PFedRec, draws of leave_one_out", "sampled", "full"),
    "FURL": ("FURL", "sampled", "full"),
    "FedAvg": ("FedAvg", "sampled", "full"),
}


@pytest.mark.parametrize("label", FILMS)
def test_films(label: str) -> None:
    arm, *ways = FILMS[label]
    found = results("movielens")["summary"][arm]
    wanted = [100 * found[way][metric]["mean"] for way in ways if way for metric in ("hr10", "ndcg10")]
    section = PAGE.partition("## Recommendation")[2].partition("## FURL")[0]
    check_line(section, rf"\| {label} \|(.*?\|.*?\|.*?\|.*?)\|", *wanted)


def test_films_published() -> None:
    known = results("movielens")["published"]
    check_line(PAGE, r"\| PFedRec, published \|(.*?\|.*?)\|", 100 * known["hr10"], 100 * known["ndcg10"])
    found = results("movielens")["summary"]
    ways = (found[f"PFedRec, draws {how}"]["sampled"]["hr10"] for how in ("as published", "of leave_one_out"))
    published, drawn = (100 * way["mean"] for way in ways)
    check_line(PAGE, r"PFedRec is (\S+) points of HR@(?:10) below", 100 * known["hr10"] - published)
    check_line(PAGE, r"(\S+) points come of what is drawn", published - drawn)


def test_furl() -> None:
    ours = 100 * mean("furl-table3", MESSAGES, FURL["Personalized FL, ours"])
    server = 100 * mean("furl-table3", MESSAGES, "Global Server")
    counted, recalled = (
        100 * mean("furl-table3", MESSAGES, name)
        for name in ("(each user's most frequent label)", "(local memory alone)")
    )
    check_line(PAGE, r"Personalized FL predicts (\S+) % .*? in one place, predicts (\S+) %", ours, server)
    check_line(PAGE, r"channel is right for (\S+) %, .*? messages\) for (\S+) %", counted, recalled)
    timed = "local memory alone", "federated text + private count prior and memory"
    by_time = (100 * mean("furl-channels", "split by time", name) for name in timed)
    check_line(PAGE, r"a memory is right for (\S+) % of .*? beside it for (\S+) %", *by_time)


def test_new_users() -> None:
    found = results("furl-table3/subreddit-words-cold-start")
    curve = dict(zip(found["k"], found["series"][0]["mean"], strict=True))
    wanted = (100 * curve[k] for k in (0, 10, "all"))
    check_line(PAGE, r"own: (\S+) % with none, (\S+) % with (?:10), (\S+) % with all", *wanted)


def test_kteps() -> None:
    rows = {r["method"]: r for r in results("kteps-table3") if r["metric"] == "accuracy_ap"}
    wanted = [
        100 * rows[name][of]
        for name in ("FedAvg", "KTEPS", "KTEPS⋆", "Indiv")
        for of in ("value", "published")
    ]
    check_line(PAGE, r"\| Ap \|(.*?\|.*?\|.*?\|.*?)\|", *wanted)

    def ap(file: str, *methods: str, scene: str = "FDU") -> list[float]:
        return [100 * mean(file, scene, name, "accuracy_ap") for name in methods]

    glove = ap("kteps-vectors", "KTEPS, GloVe, 150 numbers", "FedAvg, GloVe, 150 numbers")
    check_line(PAGE, r"the two are level: KTEPS (\S+) %, FedAvg (\S+) %", *glove)
    ruled = ap("kteps-variants", "linear schedule", "FedAvg, linear schedule")
    check_line(PAGE, r"KTEPS is ahead: (\S+) % against (\S+) % after", *ruled)
    whole = "FDU, trained on all training reviews"
    dropout = ap("kteps-readings", "KTEPS, dropout", "FedAvg, dropout", scene=whole)
    check_line(PAGE, r"helps both: KTEPS to (\S+) %, FedAvg to (\S+) %", *dropout)


def test_mixture() -> None:
    rows = results("moe-table2")
    table = [r for r in rows if "paper's protocol" in r["scene"] and r["published"]]
    check_line(
        PAGE, r"within (\S+) points of the", max(100 * abs(r["value"] - r["published"]) for r in table)
    )
    scene = "CIFAR-10, 5 × 500, p = 0.8, paper's protocol"
    wanted = (100 * mean("moe-table2", scene, name) for name in ("Mixture", "Fine-tuned", "Local"))
    check_line(PAGE, r"mixture has (\S+) %, fine-tuning (\S+) %, local training (\S+) %", *wanted)


def test_speed() -> None:
    check_line(PAGE, r"\| 5 to 160 \| (.*? × \| .*? ×) \|", *speedups())
    rows = {(r["workload"], r["cohort"], r["contender"]): r for r in results("speed-cuda")}
    lstm = [rows["W1", n, "fedkeep_vectorised"]["ratio_to_plain"] for n in (10, 40, 160)]
    images = [rows[w, 5, "fedkeep_vectorised"]["ratio_to_plain"] for w in ("W3", "W4")]
    check_line(PAGE, r"the LSTM is (\S+) to (\S+) times", min(lstm), max(lstm))
    assert round(images[0]) == round(images[1])
    check_line(PAGE, r"convolutions (\S+) times", images[0])
    readme = text_of(README)
    assert f"{min(lstm):.0f} to {max(lstm):.0f} times" in readme
    assert f"for 10 to 160 clients; convolutions {images[0]:.0f} times" in readme
    check_line(PAGE, r"median of twelve is (\d\.\d)", results("own-models")["median"])
    clock = results("own-clock")["rows"]
    rows = [row["over_better_plain"] for row in clock]
    slower = sum(highest < 1 for _, _, highest in rows)
    middle = statistics.median(median for _, median, _ in rows)
    peers = [[float(over(row, who)) for row in clock if row["over_peers"]] for who in ("pfl", "flower")]
    said = (
        r"ten of them are (\S+) to (\S+) times as fast as in pfl, (\S+) to (\S+) times as fast as in Flower"
    )
    check_line(PAGE, said, *(edge(of) for of in peers for edge in (min, max)))
    assert len(peers[0]) == len(peers[1]) == 10
    said = r"are (\S+) times as fast as the better of two plain loops on two cores \(median of (\d+)\), (\d+) are slower"
    check_line(PAGE, said, middle, len(rows), slower)


def test_faults() -> None:
    found = results("faults-flower")
    memory, lines = found["memory"], found["processes"]["lines"]
    wanted = len(memory["faults"]), memory["verdicts"]["equal"], memory["tried"]
    check_line(
        PAGE, r"with (\d+) kinds of faults, over a transport.*? (\d+) of (\d+) ended with the bits", *wanted
    )
    equal, kinds = [line for line in lines if not line["wrong"]], {line["kind"] for line in lines}
    said = r"so did (\d+) of (\d+) with processes over TLS, with (\d+) kinds"
    check_line(PAGE, said, len(equal), len(lines), len(kinds))


def test_machines() -> None:
    found = results("machines")
    times, memory = found["round_times"], found["memory"]
    after = [seconds for turn in times["after"]["turns"] for seconds in turn]
    said = r"three nodes took (\d\.\d) s \(median, (\d\.\d) to (\d\.\d)\) on two cores, (\d+\.\d) s when"
    middle = times["after"]["median_seconds"], times["before"]["median_seconds"]
    check_line(PAGE, said, middle[0], min(after), max(after), middle[1])
    said = r"held (\d+) MB \(PSS\) where .*?, and (\d+) MB without those: within the target of (\d+) MB"
    check_line(PAGE, said, memory["pss_mb"], memory["alone_mb"], memory["claim_mb"])
    assert memory["alone_mb"] < memory["claim_mb"]


def test_how_far_it_goes() -> None:
    folder = ROOT / "results"
    assert (folder / "how-far.md").read_text(encoding="utf-8") == how_far.page(folder)
    page, users = text_of(DOCS / "scale.md"), results("users")
    seconds, memory = (users[of].values() for of in ("seconds", "memory_mb"))
    said = r"a round takes (\S+) s with 1,000 clients and (\S+) s with 1,000,000; memory is (\d+) MB, and (\d+) MB"
    check_line(page, said, *seconds, *memory)
    slurm, ray = ({one["place"]: one for one in results("cluster")["places"]}[of] for of in ("slurm", "ray"))
    said = (
        r"(\d+) of (\d+) runs by Slurm, (\d+) of (\d+) by Ray equal one machine's; (\d+) and (\d+) processes"
    )
    equal = [one[of] for one in (slurm, ray) for of in ("equal", "runs")]
    check_line(page, said, *equal, slurm["killed"], ray["killed"])
    loads = results("fleet-load")["rows"]
    small, large = loads["100x1"], loads["100x20"]
    said = r"100 nodes have (\S+) rounds a minute with a model of (\d+) MB, (\S+) with one of (\d+)"
    shown = [(one["rounds_a_minute"], one["model_bytes"] / 1e6) for one in (small, large)]
    check_line(page, said, *(number for one in shown for number in one))
    fleet = next(line for line in how_far.page(folder).splitlines() if "take a whole core" in line)
    check_line(page, r"(\d+) nodes that look for messages fill a core", float(fleet.split("|")[2]))
