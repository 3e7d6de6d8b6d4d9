import math

import pytest

from fedkeep.report.text_tables import (
    TextTable,
    latex_escape,
    markdown_escape,
    mean_std,
    to_csv,
    to_latex,
    to_markdown,
)


def test_markdown_shows_any_cell_as_it_is() -> None:
    table = TextTable(("a|b", "n"), (("<script>x</script>", "*1*"),), title="t", left=1)
    assert to_markdown(table) == (
        "### t\n\n| a\\|b | n |\n|:---|---:|\n| &lt;script&gt;x&lt;/script&gt; | \\*1\\* |\n"
    )
    assert markdown_escape("a\nb") == "a\\\\nb"


def test_a_row_must_fit() -> None:
    with pytest.raises(ValueError, match="1 cells in a table of 2 columns"):
        TextTable(("a", "b"), (("x",),))


def test_mean_and_deviation_by_hand() -> None:
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_std([4.0]) == (4.0, None)
    mean, std = mean_std([])
    assert math.isnan(mean)
    assert std is None


def test_a_cell_without_a_value_is_never_bold() -> None:
    table = TextTable(("a", "b"), (("x", "–"), ("y", "1")), bold=frozenset({(0, 1), (1, 1)}))
    assert table.bold == {(1, 1)}
    assert "**–**" not in to_markdown(table)


BOLD = TextTable(
    ("method", "acc"), (("a_b", "62.4 ± 0.5 %"), ("c", "−1 %")), note="100 % of it", bold=frozenset({(0, 1)})
)


def test_bold_cells() -> None:
    assert "| a\\_b | **62.4 ± 0.5 %** |\n| c | −1 % |" in to_markdown(BOLD)


def test_latex_has_booktabs_rules_and_no_free_specials() -> None:
    assert to_latex(BOLD) == (
        "% 100 % of it\n% Wants \\usepackage{booktabs,graphicx}.\n"
        "\\resizebox{\\ifdim\\width>\\columnwidth\\columnwidth\\else\\width\\fi}{!}{%\n"
        "\\begin{tabular}{@{}lr@{}}\n\\toprule\nmethod & acc \\\\\n\\midrule\n"
        "a\\_b & \\textbf{62.4 $\\pm$ 0.5 \\%} \\\\\nc & $-$1 \\% \\\\\n\\bottomrule\n\\end{tabular}}\n"
    )
    wide = TextTable(("a", "a heading of many words"), (("x", "1 of 12 cells"),))
    assert r"a & \shortstack[r]{a heading of \\ many words} \\" in to_latex(wide)
    assert latex_escape("[a]{b}\\^~&$#<>|\n") == (
        r"{[}a]\{b\}\textbackslash{}\textasciicircum{}\textasciitilde{}\&\$\#\textless{}\textgreater{}\textbar{}"
        r"\textbackslash{}n"
    )


def test_csv_has_numbers_in_full_and_no_formulas() -> None:
    rows = [{"name": 'a,"b"', "x": 1 / 3, "y": None}, {"name": "=1+1", "x": math.nan, "z": -2}]
    assert to_csv(rows) == 'name,x,y,z\n"a,""b""",0.3333333333333333,,\n\'=1+1,,,-2\n'
