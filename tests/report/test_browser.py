"""Opens the page in headless Chromium, offline, from a file."""

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkeep.report.page import write_report
from tests.report.run_folders import HOSTILE, all_analyses, map_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: the page was not opened"
)

POINT = """<script>
var point = document.querySelector(".wide [data-u]");
point.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, clientX: 20, clientY: 20}));
document.body.dataset.shown = document.getElementById("tip").textContent;
document.body.dataset.marked = document.querySelectorAll(".wide .same").length;
document.body.dataset.wide = document.documentElement.scrollWidth > window.innerWidth;
</script>"""


def dom(page: Path, profile: Path, *more: str) -> tuple[str, str]:
    """Return the document after its scripts ran, and what the browser logged."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --window-size=1000,900"
    )
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), *more, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, done.stderr


def test_the_page_works_offline(write_run: Callable[..., Path], tmp_path: Path) -> None:
    folder = write_run(analyses=all_analyses())
    page = write_report([folder], tmp_path / "out")
    text, log = dom(page, tmp_path / "profile")
    assert "CONSOLE" not in log
    tips = [html.unescape(t) for t in re.findall(r"<title>(.*?)</title>", text, re.DOTALL)]
    assert any(t.startswith("epoch 0\nPersonalized FL ") for t in tips)
    assert any(
        re.fullmatch(r"user-7\nmost used label: \w+\naccuracy: \d+\.\d %\n\d+ examples?", t) for t in tips
    )

    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", POINT + "</body>"))
    text, log = dom(probe, tmp_path / "profile")
    assert "CONSOLE" not in log
    shown = re.search(r'data-shown="([^"]*)"', text)
    assert html.unescape(shown[1]).startswith(f"{HOSTILE}\nmost used label: ")
    assert 'data-marked="2"' in text  # the same user in both maps
    assert 'data-wide="false"' in text  # nothing sticks out of a narrow window


def test_the_policy_stops_what_is_outside_and_errors_are_seen(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    page = write_report([write_run()], tmp_path / "out")
    (tmp_path / "out" / "other.js").write_text("document.body.dataset.loaded = 1;")
    probe = page.with_name("probe.html")
    probe.write_text(page.read_text().replace("</body>", '<script src="other.js"></script></body>'))
    text, log = dom(probe, tmp_path / "profile")
    assert "data-loaded" not in text
    assert "CONSOLE" in log
    assert "Content Security Policy" in log


NARROW = """<body style="margin: 0"><iframe src="report.html" style="width: 400px; height: 900px" onload="
var there = this.contentDocument.documentElement;
document.body.dataset.wide = there.scrollWidth - 400;
document.body.dataset.reached = [...there.querySelectorAll('a[href], summary')].every(e => {
  e.focus(); return this.contentDocument.activeElement === e || !e.checkVisibility(); });
"></iframe>"""


def test_the_page_fits_a_phone_and_the_keyboard_reaches_its_links(
    write_run: Callable[..., Path], tmp_path: Path
) -> None:
    long = map_of(9, 0, ["a"]) | {"title": "x" * 200}
    folder = write_run(name="y" * 200, analyses={**all_analyses(), "embedding_map": long})
    page = write_report([folder], tmp_path / "out")
    probe = page.with_name("narrow.html")
    probe.write_text(NARROW)
    text, log = dom(probe, tmp_path / "profile", "--allow-file-access-from-files")
    assert "CONSOLE" not in log
    wide = re.search(r'data-wide="(-?\d+)"', text)
    assert int(wide[1]) <= 0
    assert 'data-reached="true"' in text
