"""The page of speed shows a GPU's numbers as they were measured."""

from __future__ import annotations

from tests.test_measured import DOCS, SPEED, check, results, speed_of, table

README = DOCS.parent / "README.md"


def test_speed_on_a_gpu() -> None:
    body, known = table(SPEED, lambda t: t[0][0] == "on the GPU"), [""]
    rows = {(r["workload"], r["cohort"], r["contender"]): r for r in results("speed-cuda")}
    assert len(body) == len(rows) / 3
    for row in body:
        name, cohort, _ = speed_of(row, known)
        ours, alone = (rows[name, cohort, f"fedkeep_{e}"] for e in ("vectorised", "sequential"))
        check(f"{name}, {cohort}", row[2].partition("(")[0], [ours["ratio_to_plain"]])
        check(f"{name}, {cohort}", row[3], [alone["seconds"] / ours["seconds"]])
        check(f"{name}, {cohort}", row[4], [ours["seconds"]])
    lstm = [rows["W1", n, "fedkeep_vectorised"]["ratio_to_plain"] for n in (10, 40, 160)]
    images = [rows[w, 5, "fedkeep_vectorised"]["ratio_to_plain"] for w in ("W3", "W4")]
    for page in (README, DOCS / "measured.md"):
        words = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{min(lstm):.0f} to {max(lstm):.0f} times" in words
    assert f"For convolutions it is {images[0]:.0f} times" in " ".join(README.read_text("utf-8").split())
    assert round(images[0]) == round(images[1])
    spread = rows["W1", 160, "fedkeep_vectorised"]
    assert f"({spread['low']:.1f} to {spread['high']:.1f})" in body[2][2]
