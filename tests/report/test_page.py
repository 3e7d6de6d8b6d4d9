import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.records import Record, to_line
from fedkeep.report.page import build, to_html, to_markdown_page, write_report
from fedkeep.report.runs import read_run
from tests.report.run_folders import (
    HOSTILE,
    add_records,
    all_analyses,
    map_of,
    write_info,
    write_records,
    write_run_folder,
)

Write = Callable[..., Path]


class Page(HTMLParser):
    """Collects tags, attributes and shown text, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def read(page: Path) -> Page:
    return Page(page.read_text(encoding="utf-8"))


FOUR = (
    ("Global Server", 0.29, True),
    ("Personalized Server", 0.65, True),
    ("Global FL", 0.15, False),
    ("Personalized FL", 0.62, False),
)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four configurations with two seeds each; one run has analyses."""
    root = tmp_path_factory.mktemp("four")
    return [
        write_run_folder(
            root / f"{name.replace(' ', '-')}-{seed}",
            name=name,
            seed=seed,
            end=end + 0.01 * seed,
            centralised=centralised,
            analyses=all_analyses() if (name, seed) == ("Personalized FL", 0) else None,
        )
        for name, end, centralised in FOUR
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def page_of_four(four: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of all of them."""
    return write_report(four, tmp_path_factory.mktemp("page"), title="FURL")


def words(*folders: Path) -> str:
    """Return a report as Markdown; nothing is drawn."""
    return to_markdown_page(build([read_run(folder) for folder in folders], "t"))


def test_the_page_has_the_numbers(page_of_four: Path) -> None:
    assert page_of_four.name == "report.html"
    texts = read(page_of_four).texts
    for wanted in (
        "FURL",
        "62.5 ± 0.7 %",
        "29.5 ± 0.7 %",
        "63.0 %",
        "−0.5 points",
        "21.5 kB",
        "128 B",
        "16.4 kB",
        "128 × 32",
        "71.2 %",
        "0.31",
        "11,200",
        "2.13.0",
        "Sweep of learning rates · Personalized FL, seed 0",
        "12.1 %",
        "The same everywhere",
    ):
        assert wanted in texts, wanted
    # 6 evaluations, each up with 10 clients of 21,504 bytes
    assert "1.3 MB" in texts


def test_markdown_and_json_agree_with_the_page(page_of_four: Path) -> None:
    texts = set(read(page_of_four).texts)
    markdown = page_of_four.with_suffix(".md").read_text()
    content = json.loads(page_of_four.with_suffix(".json").read_text())
    assert [s["title"] for s in content["sections"]] == re.findall(r"^## (.*)$", markdown, re.MULTILINE)
    cells = 0
    for section in content["sections"]:
        for block in section["blocks"]:
            table = block if block["kind"] == "table" else block.get("table")
            for row in (table or {}).get("rows", []):
                for cell in row:
                    cells += 1
                    assert cell in texts, cell
                    shown = cell.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
                    assert shown in markdown.replace("\\", ""), cell
    assert cells > 200
    summary = {entry["configuration"]: entry for entry in content["summary"]}
    assert summary["Personalized FL"]["test"] == pytest.approx(0.625)
    assert summary["Personalized FL"]["std"] == pytest.approx(0.01 / math.sqrt(2))
    assert summary["Global Server"]["centralised"] is True
    assert summary["Global FL"]["seeds"] == [0, 1]


def test_nothing_is_loaded_from_outside(page_of_four: Path) -> None:
    text = page_of_four.read_text(encoding="utf-8").replace("url(#", "")  # a part of the page
    for outside in ("http:", "https:", "url(", "@import"):
        assert outside not in text
    parsed = read(page_of_four)
    assert not {"img", "iframe", "object", "embed", "base", "audio", "video", "image"} & set(parsed.tags)
    links = [
        (tag, value)
        for tag, name, value in parsed.attributes
        if name in ("src", "href", "xlink:href", "srcset")
    ]
    assert {value[0] for tag, value in links if tag in ("a", "use")} == {"#"}
    assert [value for tag, value in links if tag not in ("a", "use")] == ["data:,"]
    anchors = {value for _, name, value in parsed.attributes if name == "id"}
    assert {value[1:] for tag, value in links if tag in ("a", "use")} <= anchors
    policy = next(v for _, name, v in parsed.attributes if name == "content" and "default-src" in v)
    assert policy.startswith("default-src 'none';")


def test_all_text_is_escaped(write_run: Write, tmp_path: Path) -> None:
    evil = '"><img src=x onerror=alert(1)>'
    analyses = {
        "embedding_map": {**map_of(5, 0, [evil]), "title": evil, "note": evil, "trait_name": evil},
        evil: {"columns": [evil], "rows": [[evil]], "title": evil, "note": evil},
        "cold_start": {"k": [0, 1], "series": [{"name": evil, "mean": [0.1, 0.2]}]},
    }
    folder = write_run(
        name=evil,
        analyses=analyses,
        config={evil: evil},
        status=evil,
        environment={evil: evil},
        data={"name": evil},
        split_table=[{"name": evil, "half": evil, "shape": [evil], "bytes": 1}],
        method=evil,
        created=evil,
    )
    lines = [to_line(Record(1, 1.0, "test", client, "accuracy", 0.5, 3)) for client in (HOSTILE, evil)]
    add_records(folder, "".join(lines))
    page = write_report([folder], tmp_path / "out", title=evil)
    parsed = read(page)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert evil in parsed.texts
    markdown = page.with_suffix(".md").read_text()
    assert "<" not in markdown


def test_one_run_without_analyses(write_run: Write, tmp_path: Path) -> None:
    page = write_report([write_run()], tmp_path / "page.html")
    texts = read(page).texts
    assert page.name == "page.html"
    assert "62.0 %" in texts
    assert "Map of user vectors" not in texts
    assert "Personalized FL" in texts
    assert page.with_suffix(".md").exists()


def test_metrics_that_runs_asked_for(write_run: Write) -> None:
    """Of the round that is best by accuracy: seeds 0.5 and 0.6, sample deviation 7.1 points."""
    folders = [write_run(f"run-{seed}", seed=seed) for seed in (0, 1)]
    plain = words(*folders)
    for folder, value in zip(folders, (0.5, 0.6), strict=True):
        found = [
            Record(20, 5.0, "test", None, "macro_f1", value, 9),
            Record(0, 0.0, "test", None, "macro_f1", 0.9, 9),
        ]
        add_records(folder, "".join(map(to_line, found)))
    assert "Each class counted alike" not in plain
    row = "| configuration | test macro-F1 |\n|:---|---:|\n| Personalized FL | 55.0 ± 7.1 % |"
    shown = words(*folders)
    assert row in shown
    assert "At the rounds of accuracy. ± is the sample standard deviation over 2 seeds." in shown
    assert "Lines are means over 2 seeds" in shown
    assert "seeds" not in words(folders[0])


def test_settings_that_differ_stand_side_by_side(write_run: Write) -> None:
    folders = [
        write_run(n, name=n, config={"rate": r, "rounds": 20, "seed": 0}) for n, r in (("a", 0.1), ("b", 0.5))
    ]
    markdown = words(*folders)
    assert "### What differs\n\n| setting | a | b |\n|:---|:---|:---|\n| rate | 0.1 | 0.5 |\n" in markdown
    assert "### The same everywhere\n\n| setting | value |\n|:---|:---|\n| rounds | 20 |\n" in markdown


def test_the_best_possible_depends_on_what_a_model_knows(write_run: Write, tmp_path: Path) -> None:
    federated = [{"name": "w", "shape": [2], "half": "federated", "bytes": 8}]
    runs = [
        write_run("g", name="Global FL", end=0.26, best=0.63, best_global=0.27, split_table=federated),
        write_run("p", name="Personalized FL", end=0.62, best=0.63, best_global=0.27),
    ]
    page = write_report(runs, tmp_path / "out")
    found = {
        e["configuration"]: e["best_possible"]
        for e in json.loads(page.with_suffix(".json").read_text())["summary"]
    }
    assert found == {"Global FL": 0.27, "Personalized FL": 0.63}
    text = page.read_text()
    assert "best possible 63.0 %</text>" in text
    assert "best possible without knowing the user 27.0 %</text>" in text


def test_an_unfinished_run_says_so(write_run: Write, tmp_path: Path) -> None:
    folder = write_run(status="running", best=None)
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"round"')
    texts = read(write_report([folder], tmp_path)).texts
    warned = [text for text in texts if text.startswith("Personalized FL: ")]
    assert ["status: running" in warned[0], "after round 20" in warned[1]] == [True, True]
    assert {"valid accuracy so far", "not finished"} <= set(texts)


def test_a_run_without_any_record_still_gives_a_page(write_run: Write) -> None:
    folder = write_run(status="running")
    write_records(folder, "")
    content = build([read_run(folder)], "t")
    assert [card.note for card in content.cards] == ["nothing measured yet"]
    assert to_html(content)


def test_a_minimal_run_json_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    write_info(folder, {"status": "finished", "format": 4, "run": "x", "rounds": 1})
    write_records(folder, to_line(Record(1, 0.0, "test", None, "rmse", 1.5, 3)))
    texts = read(write_report([folder], tmp_path / "out")).texts
    assert "bare" in texts
    assert "1.5" in texts


def test_numbers_that_are_not_finite_are_left_out(write_run: Write, tmp_path: Path) -> None:
    folder = write_run()
    lines = [
        to_line(Record(24, 6.0, "valid", None, "accuracy", math.nan, 3)),
        to_line(Record(20, 5.0, "test", "user-1", "accuracy", math.nan, 0)),
    ]
    add_records(folder, "".join(lines))
    page = write_report([folder], tmp_path / "out")
    text = page.read_text()
    assert "nan" not in re.sub(r"<style>.*</style>", "", text, flags=re.DOTALL).lower()
    content = json.loads(page.with_suffix(".json").read_text())
    users = next(s for s in content["sections"] if s["title"] == "Spread over users")
    assert users["blocks"][0]["data"][0]["undefined"] == 1


def test_a_damaged_line_stops_the_report(write_run: Write, tmp_path: Path) -> None:
    folder = write_run()
    path = folder / "records.jsonl"
    write_records(folder, "oops\n" + path.read_text())
    with pytest.raises(RunError, match=re.escape(f"{path}, line 1: not a record")):
        write_report([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_same_input_gives_the_same_bytes(four: list[Path], page_of_four: Path, tmp_path: Path) -> None:
    assert write_report(four, tmp_path, title="FURL").read_bytes() == page_of_four.read_bytes()


def test_one_run_of_a_long_name_is_called_by_it(write_run: Write, tmp_path: Path) -> None:
    name = "x" * 90
    runs = [write_run("a", name=name), write_run("b", name="y" * 90)]
    for shown, title in ((runs[:1], name), (runs, "2 runs compared")):
        page = write_report(shown, tmp_path / str(len(shown)))
        assert f"# {title}\n" in page.with_suffix(".md").read_text()


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^A report needs at least one run folder\.$"):
        write_report([], tmp_path)


def test_many_users_make_a_page_of_bearable_size(write_run: Write, tmp_path: Path) -> None:
    folder = write_run(
        users=3800, analyses={"embedding_map": map_of(3800, 0, ["Personalized Server", "Personalized FL"])}
    )
    page = write_report([folder], tmp_path / "out")
    assert page.stat().st_size < 3_000_000


@pytest.mark.parametrize("metric", ["rmse", "accuracy"])
def test_losses_in_two_units_are_told_of(write_run: Write, metric: str) -> None:
    """Standardised amounts are learned in deviations, and judged in their own unit."""
    folder = write_run()
    splits = (("train", "loss"), ("valid", "loss"), ("valid", metric))
    records = [Record(n, float(n), split, None, name, 0.5, 5) for n in (1, 2) for split, name in splits]
    write_records(folder, "".join(map(to_line, records)))
    page = to_html(build([read_run(folder)], "t"))
    assert ("of a single amount is in its own unit" in page) == (metric == "rmse")
