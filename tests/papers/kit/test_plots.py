from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.report.analysed import figures_of
from fedkeep_papers.kit import canvas, plots
from tests.report.run_folders import all_analyses, curve
from tests.tiny import fill_disk

PNG = b"\x89PNG"


def test_every_figure_is_drawn_and_repeats(tmp_path: Path) -> None:
    analyses = all_analyses()
    made = {}
    for turn in ("a", "b"):
        folder = tmp_path / turn
        curves = {name: list(enumerate(curve(end, 10))) for name, end in (("_hidden $x$", 0.3), ("FL", 0.6))}
        bars = [
            ("Global FL", 0.158, 0.119),
            ("Personalized FL, best recipe", 0.62, None),
            ("not run", None, 0.5),
        ]
        made[turn] = [
            plots.learning_curves(curves, folder / "curves.svg", metric="accuracy", title="$t"),
            plots.comparison_bars(bars, folder / "bars.svg", metric="accuracy", std={"Global FL": 0.01}),
            plots.client_distribution(
                {"FL": [0.5, float("nan")], "S": [0.1, 0.9]},
                folder / "users.svg",
                metric="accuracy",
            ),
            *(
                plots.write(figure, folder / f"{name}.svg")
                for name in ("embedding_map", "cold_start", "aggregation_time")
                for figure in figures_of(name, analyses[name])
            ),
        ]
    for first, second in zip(made["a"], made["b"], strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
        assert len(first.read_bytes()) > 5000


def test_a_bar_is_labelled_by_its_decimal_number() -> None:
    axes = Figure().subplots()
    plots._bars(axes, 0.0, [0.8405, None, 0.1234], [0.0, 0.0, 0.0], 100, "published")
    assert [text.get_text() for text in axes.texts] == ["84.1", "12.3"]


def test_a_single_seed_has_no_whisker() -> None:
    axes = Figure().subplots()
    plots._bars(axes, 0.0, [0.5, 0.6], [0.0, 2.0], 100, "ours")
    (whiskers,) = (c for c in axes.collections if c.get_segments())
    ends = [[y for _, y in segment] for segment in whiskers.get_segments() if len(segment)]
    assert [e for e in ends if e[0] == e[0]] == [[58.0, 62.0]]


def test_png_by_the_ending(tmp_path: Path) -> None:
    (figure,) = figures_of("aggregation_time", {"cohort": [1, 10], "seconds": [0.1, 1.0]})
    assert plots.write(figure, tmp_path / "new" / "t.png").read_bytes().startswith(PNG)
    with pytest.raises(ConfigError, match=r"\.png or \.svg; got 't\.gif'"):
        plots.write(figure, tmp_path / "t.gif")


def test_a_figure_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.svg").write_text("old")
    fill_disk(monkeypatch, "replace")
    with pytest.raises(RunError, match=r"^Cannot write .*f\.svg: No space left on device"):
        canvas.save(Figure(), tmp_path / "f.svg")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"f.svg": "old"}


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        plots.comparison_bars([], tmp_path / "b.png", metric="accuracy")
    with pytest.raises(ConfigError, match="at least one value"):
        plots.client_distribution({"a": []}, tmp_path / "b.png", metric="accuracy")


def test_several_ways_of_cold_start(tmp_path: Path) -> None:
    analysis = {
        "k": [0, "all"],
        "series": [{"name": "a", "mean": [0.1, None]}, {"name": "b", "mean": [0.2, 0.3]}],
    }
    (figure,) = figures_of("cold_start", analysis)
    assert [e.label for e in figure.legend] == ["a", "b"]
    assert plots.write(figure, tmp_path / "c.png").read_bytes().startswith(PNG)


def test_a_partition(tmp_path: Path) -> None:
    counts, options = [[3, 0], [1, 9]], {"clients": ["_a", "$b"], "classes": ["x", "y"], "opted_out": [1]}
    first = plots.partition_plot(counts, tmp_path / "a.svg", title="t", **options)  # type: ignore[arg-type]
    second = plots.partition_plot(counts, tmp_path / "b.svg", title="t", **options)  # type: ignore[arg-type]
    assert first.read_bytes() == second.read_bytes()
    plain = plots.partition_plot(counts, tmp_path / "c.svg", title="t")
    assert plain.read_bytes() != first.read_bytes()
    many = [[i % 3] * 60 for i in range(70)]  # too many cells for numbers, more names than fit
    assert plots.partition_plot(many, tmp_path / "d.png").read_bytes().startswith(PNG)
    for wrong in ([], [[]], [[1, 2], [3]]):
        with pytest.raises(ConfigError, match="A plot of a partition needs a number per client and class"):
            plots.partition_plot(wrong, tmp_path / "e.png")
    with pytest.raises(ConfigError) as error:
        plots.partition_plot(counts, tmp_path / "e.png", clients=["a"])
    assert str(error.value) == (
        "A plot of a partition needs a number per client and class; got 2 × 2 numbers, 1 client names and 2 class names."
    )
