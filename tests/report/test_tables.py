import math

import pytest

from fedkeep.report.tables import Table, markdown_escape, mean_std, to_markdown


def test_markdown_shows_any_cell_as_it_is() -> None:
    table = Table(("a|b", "n"), (("<script>x</script>", "*1*"),), title="t", left=1)
    assert to_markdown(table) == (
        "### t\n\n| a\\|b | n |\n|:---|---:|\n| &lt;script&gt;x&lt;/script&gt; | \\*1\\* |\n"
    )
    assert markdown_escape("a\nb") == "a\\\\nb"


def test_a_row_must_fit() -> None:
    with pytest.raises(ValueError, match="1 cells in a table of 2 columns"):
        Table(("a", "b"), (("x",),))


def test_mean_and_deviation_by_hand() -> None:
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_std([4.0]) == (4.0, None)
    mean, std = mean_std([])
    assert math.isnan(mean)
    assert std is None
