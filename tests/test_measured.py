"""README's numbers and the tables of the pages of what was measured are those of the files in results/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import claims
from tests.documents import ROOT

README, DOCS = ROOT / "README.md", ROOT / "docs"
MEASURED = DOCS / "measured.md"
SPEED, FURL_PAGE, MIXTURE = (DOCS / "measured" / f"{name}.md" for name in ("speed", "furl", "mixture"))
NUMBER = re.compile(r"[+−-]?\d+(?:\.\d+)?")
Table = list[list[str]]


def results(name: str) -> Any:
    """Return the rows of a table, without those of scenes whose data are not there."""
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    if not isinstance(content, list):
        return content
    return [row for row in content if not str(row.get("scene", "")).endswith("no data here")]


def tables(page: Path) -> Iterator[Table]:
    """Yield a page's tables: the head, then the rows."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found: Table = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
        elif found:
            yield [row for row in found if not row[-1].startswith("---")]
            found = []


def table(page: Path, wanted: Callable[[Table], bool]) -> Table:
    """Return the body of the one table that is wanted."""
    (found,) = [each for each in tables(page) if wanted(each)]
    return found[1:]


def said(cell: str) -> list[str]:
    return NUMBER.findall(cell)


def check(where: str, cell: str, numbers: list[float]) -> None:
    """Check that a cell shows these numbers and no others, rounded to the digits that it shows."""
    shown = said(cell)
    assert len(shown) == len(numbers), f"{where}: {cell!r} should show {numbers}"
    for text, number in zip(shown, numbers, strict=True):
        digits = len(text.partition(".")[2])
        off = abs(float(text.replace("−", "-")) - number)
        assert off <= 0.5 * 10**-digits + 1e-9, f"{where}: {cell!r} shows {text}, measured was {number:.4g}"


def percent(row: dict[str, Any]) -> list[float]:
    """Return mean and, where there is one, deviation in percent."""
    return [100 * row["value"], *([100 * row["std"]] if row["std"] is not None else [])]


def by_scene(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["scene"], row["method"]): row for row in results(name)}


def speed_of(row: list[str], known: list[str]) -> tuple[str, int, str | None]:
    """Return workload, clients and the loop that ratios are over (None: whoever the column names)."""
    if row[0] == "the same, over loops that pad":
        return "W1 ragged", 6, "plain_padded"
    name = "W1 ragged" if "10 to 200" in row[0] else row[0].partition(":")[0] or known[-1]
    known.append(name)
    return name, int(row[1]), None


SPEEDS = ("speed", "speed-zen4", "speed-avx2")


def test_speed() -> None:
    files = [results(name) for name in SPEEDS]
    body, known = table(SPEED, lambda t: t[0][0] == "workload"), [""]
    assert len(body) >= 6
    for row in body:
        name, cohort, over = speed_of(row, known)
        best = [claims.best(rows, name, cohort) for rows in files]
        for contender, cell in zip(("plain", "pfl", "flower"), row[2:], strict=True):
            if cell == "–":
                assert over
                continue
            check(f"{name}, {cohort}", cell, [r[f"ratio_to_{over or contender}"] for r in best if r])


def test_small_clients() -> None:
    """Each number is the least or the greatest of the models' medians."""
    body = table(SPEED, lambda t: t[0] == ["what", "measured", "command"])
    (cell,) = [row[1] for row in body if row[0].startswith("a round of small clients")]
    shown = dict(re.findall(r"[Cc]ohort (\d+): ([\d.; to]+\d)", cell))
    cases = results("small")["cases"]
    assert {int(cohort) for cohort in shown} == {case["cohort"] for case in cases}
    for cohort, numbers in shown.items():
        found = [case["auto_over"] for case in cases if case["cohort"] == int(cohort)]
        medians = [[case[other]["median"] for case in found] for other in ("plain", "workers", "sequential")]
        check(f"cohort {cohort}", numbers, [edge(of) for of in medians for edge in (min, max)])


def test_own_models() -> None:
    files = [
        {row["model"]: row for row in results(name)["rows"]} for name in ("own-models", "own-models-xeon")
    ]
    body = table(SPEED, lambda t: t[0][0] == "model")
    assert {model for model, *_ in body} == files[0].keys()
    for model, engine, *cells in body:
        for rows, cell in zip(files, cells, strict=True):
            ratio = rows[model]["ratio_to_plain"]["fedkeep"]
            assert engine == rows[model]["engines"]["fedkeep"]
            check(model, cell, [ratio[name] for name in ("median", "low", "high")])


FURL = {
    "Global FL, the paper's recipe": "Global FL, paper's recipe",
    "Personalized FL, the paper's recipe": "Personalized FL, paper's recipe",
    "Global FL, ours": "Global FL, best recipe",
    "Global FL, our recipe": "Global FL, best recipe",
    "Personalized FL, ours": "Personalized FL, best recipe",
    "Personalized FL, our recipe": "Personalized FL, best recipe",
    "known without training": "(each user's most frequent label)",
}
SCENES = ("zulip_channels", "zulip_channels, bag of words", "sticker-like (generated)")


def test_furl() -> None:
    rows = by_scene("furl-table3")
    body = table(MEASURED, lambda t: t[1][0] == "Global Server" and len(t[0]) == 4)
    assert len(body) == 7
    for name, *cells in body:
        for scene, cell in zip(SCENES, cells, strict=True):
            row = rows.get((scene, FURL.get(name, name))) or rows[scene, "(best possible, user known)"]
            check(f"{scene}, {name}", re.sub(r"\([^)]*\)", "", cell), percent(row))


def test_furl_without_training() -> None:
    rows = by_scene("furl-table3")
    body = table(FURL_PAGE, lambda t: t[0][0] == "without training")
    names = {"own counts, decayed": "(own counts, decayed)", "local memory alone": "(local memory alone)"}
    assert len(body) == 3
    for name, messages, clicks in body:
        counting = ("(each user's most frequent label)", "(each user's share of positive labels)")
        for_messages, for_clicks = (names[name],) * 2 if name in names else counting
        for scene in SCENES[:2]:
            check(f"{scene}, {name}", messages, percent(rows[scene, for_messages]))
        row = rows.get((SCENES[2], for_clicks))
        check(f"{SCENES[2]}, {name}", clicks, percent(row) if row else [])


def test_new_users() -> None:
    bodies = [t[1:] for t in tables(FURL_PAGE) if t[0][0] == "k"]
    for body, scene in zip(bodies, ("subreddit-words", "subreddit"), strict=True):
        found = results(f"furl-table3/{scene}-cold-start")
        for (_, *cells), curve in zip(body, found["series"], strict=False):  # a third was measured once
            for k, cell, value in zip(found["k"], cells, curve["mean"], strict=True):
                check(f"{curve['name']}, k = {k}", cell, [] if value is None else [100 * value])
    text = " ".join(FURL_PAGE.read_text(encoding="utf-8").split())
    fitted, counted = (curve["mean"] for curve in found["series"])
    ahead = [
        100 * (a - b) for k, a, b in zip(found["k"], fitted, counted, strict=True) if k in (20, 50, "all")
    ]
    assert f"From 20 on the vector is {min(ahead):.1f} to {max(ahead):.1f} points ahead" in text
    assert "Nowhere is a larger k significantly worse" in found["note"]


def test_ratings() -> None:
    rows = {(r["scene"], r["method"]): r for r in results("natural-users") if r["metric"] == "rmse"}
    body = table(FURL_PAGE, lambda t: t[0][0] == "RMSE of ratings")
    assert [name.partition(",")[0] for name, *_ in body] == ["Local", "FedAvg", "FURL"]
    for name, *cells in body:
        for data, cell in zip(("MovieLens-100K", "InstEval"), cells, strict=True):
            row = rows[f"{data}, ratings", name.partition(",")[0]]
            check(f"{data}, {name}", cell, [row["value"], row["std"]])


def test_channels() -> None:
    rows = by_scene("furl-channels")
    body = table(FURL_PAGE, lambda t: t[0][0] == "channel of a message")
    scenes = [scene + part for scene in ("split by time", "random split") for part in (", valid", "")]
    assert {name for name, *_ in body} == {method for _, method in rows}
    for name, *cells in body:
        for scene, cell in zip(scenes, cells, strict=True):
            row = rows[scene, name]
            check(f"{scene}, {name}", cell, [] if row["value"] is None else percent(row))


def test_adapters() -> None:
    rows = by_scene("adapters")
    body = table(DOCS / "adapters.md", lambda t: t[0][0] == "channel of a message")
    assert [name for name, *_ in body] == list(dict.fromkeys(method for _, method in rows))
    for name, _, *cells in body:
        for split, cell in zip(("valid", "test"), cells, strict=True):
            check(f"{split}, {name}", cell, percent(rows[f"zulip_channels by time, {split}", name]))


def test_natural_users() -> None:
    rows = {(r["scene"], r["method"], r["metric"].split("/")[-1]): r for r in results("natural-users")}
    columns = [
        ("MovieLens-100K, ratings", "rmse"),
        ("InstEval, ratings", "rmse"),
        ("MovieLens-100K, the last film among 100", "hr10"),
        ("Shakespeare, the next character", "accuracy"),
    ]
    names = {
        "counting": "Counting",
        "local training": "Local",
        "FedAvg with fine-tuning": "FedAvg + fine-tuning",
    }
    body = table(DOCS / "natural.md", lambda t: t[0][-1] == "Shakespeare, accuracy")
    assert len(body) == 9
    for name, *cells in body[:-1]:  # the last is the mixed model's
        for (scene, metric), cell in zip(columns, cells, strict=True):
            row = rows[scene, names.get(name, name), metric]
            numbers = [row["value"], *([row["std"]] if row["std"] else [])]
            check(f"{scene}, {name}", cell, percent(row) if metric in ("hr10", "accuracy") else numbers)


def mean(file: str, scene: str, method: str, metric: str = "") -> float:
    """Return the mean of one method on a scene of a results file."""
    (row,) = [
        r for r in results(file) if (r["scene"], r["method"]) == (scene, method) and metric in r["metric"]
    ]
    return float(row["value"])


def test_what_vectors_gain_over_one_model_that_learns() -> None:
    text = " ".join(MEASURED.read_text(encoding="utf-8").split())
    gains = [
        100
        * (
            mean("furl-table3", scene, FURL["Personalized FL, ours"])
            - mean("furl-table3", scene, "Global Server")
        )
        for scene in SCENES[:2]
    ]
    assert f"Personalized FL is ahead by {gains[0]:.1f} points, and by {gains[1]:.1f} with words." in text
    assert f"private vectors gain {min(gains):.0f} to {max(gains):.0f} points" in text


def test_mixture_table_2() -> None:
    rows = by_scene("moe-table2")
    body = table(MEASURED, lambda t: t[0][1] == "p = 1" and "±" in t[1][1])
    assert [row[0] for row in body[:4]] == ["FedAvg", "Local", "Fine-tuned", "Mixture"]
    for name, *cells in body[:4]:
        for p, cell in zip(("1", "0.9", "0.8"), cells, strict=True):
            row = rows[f"CIFAR-10, 5 × 500, p = {p}, paper's protocol", name]
            check(f"{name}, p = {p}", cell, [*percent(row), 100 * row["published"]])


def test_public_fashion() -> None:
    rows = by_scene("public-fashion-medium")
    scenes = {
        "best round by test": "100 rounds, best round by test, as PFLlib",
        "chosen on validation": "100 rounds, round chosen on validation",
    }
    ((head, *body),) = [t for t in tables(DOCS / "natural.md") if t[0][0] == "100 rounds (%)"]
    assert [label for label, *_ in body] == list(scenes)
    for label, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            check(f"{method}, {label}", cell, percent(rows[scenes[label], method]))


def test_mixture_beside_all_methods() -> None:
    rows = by_scene("moe-methods-medium")
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "accuracy (%)"]
    assert len(head) == 14
    for label, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            row = rows[f"CIFAR-10, 5 × 500, {label}, clean protocol", method]
            check(f"{method}, {label}", cell, percent(row))


PARTS = {
    "nothing": "",
    "2 of 5 clients": ", q = 0.5",
    "4 of 5 clients": ", q = 0.9",
    "0.4 of each client's images, at random": ", 0.4 of each client's images out",
    "0.8 of each client's images, at random": ", 0.8 of each client's images out",
    "one of each client's two majority classes": ", 1 of each client's 2 majority classes out",
}
KINDS = {
    "the paper's CNN": "",
    "a small CNN": ", small CNN",
    "linear": ", linear",
    "the three in turn": ", several kinds",
}


def test_mixture_beyond_the_paper() -> None:
    rows, scene = by_scene("moe-figure6-medium"), "CIFAR-10, 5 × 500, p = 0.6"
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "out of FedAvg (%)"]
    assert [row[0] for row in body] == list(PARTS)
    for part, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            row = rows[f"{scene}{PARTS[part]}, clean protocol", method]
            check(f"{method}, {part}", cell, percent(row))
    ((head, *body),) = [t for t in tables(MIXTURE) if t[0][0] == "local experts (%)"]
    assert [row[0] for row in body] == list(KINDS)
    for kind, *cells in body:
        for method, cell in zip(head[1:], cells, strict=True):
            check(f"{method}, {kind}", cell, percent(rows[f"{scene}, clean protocol", method + KINDS[kind]]))


def test_kteps() -> None:
    ag = {row["method"]: row for row in results("kteps-table2") if row["metric"] == "accuracy_ag"}
    ap = {row["method"]: row for row in results("kteps-table3") if row["metric"] == "accuracy_ap"}
    body = table(MEASURED, lambda t: t[0][1] == "Ag")
    assert len(body) == 13
    for name, first, second, _ in body:
        method = name.removesuffix(", centralised")
        for cell, rows in ((first, ag), (second, ap)):
            if cell == "–":
                assert method not in rows
                continue
            assert cell.startswith("not run") == (rows[method]["value"] is None), name
            known = [rows[method][n] for n in ("value", "published") if rows[method][n] is not None]
            check(name, cell, [100 * number for number in known])


def test_kteps_readings() -> None:
    rows = {(row["scene"], row["method"], row["metric"]): row for row in results("kteps-readings")}
    held, left, whole = "held-out training reviews", "test reviews", "trained on all training reviews"
    both = ("accuracy_ap", "accuracy_ag")
    tables = {
        "reading": ((held, "accuracy_ap"), (left, "accuracy_ag")),
        whole: tuple((whole, m) for m in both),
    }
    shown = set()
    for heading, numbers in tables.items():
        for reading, *body in table(DOCS / "measured" / "kteps.md", lambda t, name=heading: t[0][0] == name):  # type: ignore[misc]
            columns = [(method, *number) for method in ("KTEPS", "FedAvg") for number in numbers]
            for (method, scene, metric), cell in zip(columns, body, strict=True):
                place = (f"FDU, {scene}", f"{method}, {reading}", metric)
                assert (cell == "–") == (place not in rows), place
                if cell == "–":
                    continue
                shown.add(place)
                found = [rows[place][name] for name in ("value", "std") if rows[place][name] is not None]
                assert (cell == "not run") == (not found), place
                check(str(place), cell, [100 * number for number in found])
    assert shown == rows.keys()
