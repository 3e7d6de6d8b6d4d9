"""The pages in docs/: their Python runs, their commands are understood. The examples show what they claim."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import call, succeeded
from tests.documents import FENCE, ROOT, blocks, fedkeep_commands, run_python
from tests.notebooks import NOTEBOOKS, run_notebook

PAGES = sorted((ROOT / "docs").rglob("*.md"))
WITH_COMMANDS = [ROOT / "README.md", *PAGES]
WITH_LINKS = [*WITH_COMMANDS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
GROUPS = ("device", "flower")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown, ran = (
        [re.sub(r"[−-]?\d+(\.\d+)?", "N", str(cell.get("outputs"))) for cell in notebook["cells"]]
        for notebook in (json.loads(path.read_text(encoding="utf-8")), run_notebook(path))
    )
    assert ran == shown  # but for numbers, which processors round differently


@cache
def help_of(*command: str) -> str:
    """Return what ``fedkeep COMMAND --help`` prints; the command must exist."""
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1"}
    result = succeeded(call(*command, "--help", env=wide))
    return result.stdout


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    for words in fedkeep_commands(page):
        command = words[: 1 + (words[0] in GROUPS)] if words[0] != "--version" else []
        known = set(re.findall(r"--[a-z][a-z-]*", help_of(*command)))
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= known, words


def test_calls_in_the_text_of_pages_need_no_further_import() -> None:
    texts = [FENCE.sub("", page.read_text(encoding="utf-8")) for page in WITH_COMMANDS]
    called = sorted({name for text in texts for name in re.findall(r"`[^`]*?\b(fedkeep(?:\.\w+)+)\(", text)})
    assert called
    words = [sys.executable, "-c", "\n".join(["import fedkeep", *called])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_stands_in_the_documents() -> None:
    listed = set(re.findall(r"^[│|\s]*([a-z]+) {2,}", help_of(), re.MULTILINE))
    assert {"demo", "run", "check", "evaluate", "personalize", "report", "reproduce", "list"} <= listed
    assert listed <= {words[0] for words in fedkeep_commands(ROOT / "docs" / "cli.md")}


def test_the_site_lists_options_by_all_names_with_defaults() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(hooks := importlib.util.module_from_spec(spec))
    listed = hooks.command_options().partition("### `fedkeep compare`")[2].partition("###")[0]
    rows = {
        cells[1].strip(): cells[-2].strip()
        for cells in (r.split("|") for r in listed.splitlines())
        if cells[2:]
    }
    assert (rows["`--seeds`"], rows["`--tune`"]) == ("`3`", "`0`")
    assert rows["`--references, --no-references`"] == "`--references`"
    assert (rows["`CONFIG...`"], rows["`--methods`"], rows["`--status`"]) == ("", "", "")


def test_configurations_in_the_documents_are_valid() -> None:
    from fedkeep.experiments.config import parse_config, parse_toml
    from fedkeep.experiments.config_tables import made_of
    from fedkeep.flower.served import federation_of
    from fedkeep.flower.signed import clients_by_node
    from fedkeep.remote.node_config import NodeConfig

    texts = [block for page in PAGES for block in blocks(page, "toml")]
    assert texts
    for block in texts:
        content = parse_toml(block.text, block.name)
        if "device" in content:
            made_of(NodeConfig, content, block.name)
        elif "rounds" in content:  # a server's, which needs no data
            federation_of(block.text, block.name)
        elif set(content) == {"clients"}:
            assert clients_by_node(block.text, content["clients"], block.name)
        else:
            parse_config(block.text, block.name)


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make, in the site as on a forge."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (
        re.sub(r"[^\w\s-]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[-\s]+", "-", title).strip("-") for title in titles}


def test_links_lead_somewhere() -> None:
    dead = []
    for page in WITH_LINKS:
        for text, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            if "://" not in target and not (
                text and file.exists() and (not anchor or anchor in anchors(file))
            ):
                dead.append(f"{page.relative_to(ROOT)}: {target}")
    assert dead == []


def example(name: str) -> Any:
    return importlib.import_module(f"examples.{name}")


def test_a_private_head_and_calibration_help_the_clinics() -> None:
    found = example("own_module").main()
    assert found["private"] > found["everything federated"] + 0.2


def test_examples_run_in_small() -> None:
    """What they claim is shown in the slow suite."""
    assert set(example("movielens_like").main(epochs=1)) >= {"own", "shared", "new, own", "ndcg@10"}
    assert set(example("cold_start").main(users=10, epochs=1)) == {0, 2, 5, 10, 20, None}


@pytest.mark.slow
def test_matrix_factorisation_learns_the_users_rows() -> None:
    found = example("movielens_like").main(epochs=12)
    assert found["own"] < found["shared"] - 0.1
    assert found["new, own"] < found["new, shared"] - 0.05
    assert found["lists"] == 5 * 10
    assert found["ndcg@10"] > 0.1


@pytest.mark.slow
def test_films_are_compared_and_listed_for_somebody_new_by_commands(tmp_path: Path) -> None:
    module = example("movielens_like")
    assert lines(module.CONFIG + module.COMMANDS) <= 40
    assert lines(inspect.getsource(module.main)) <= 40
    module.write_ratings(tmp_path)
    told = module.by_toml(tmp_path)
    ranked = told.partition("All items ranked")[2].partition("Against references")[0]
    ndcg = {
        row.split("  ")[0]: float(row.split("%")[2].split("±")[0])
        for row in ranked.splitlines()
        if row.count("%") > 3
    }
    assert ndcg["furl"] > max(ndcg["fedavg"], ndcg["local"])
    with (tmp_path / "new.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 10
    has = {tuple(row.split()[:2]) for row in (tmp_path / "new.data").read_text().splitlines()}
    assert not has & {(row["client"], row["item"]) for row in rows}


@pytest.mark.slow
def test_new_users_gain_from_their_own_examples() -> None:
    found = example("cold_start").main(users=30, epochs=6)
    assert found[None] > found[0] + 0.3


@pytest.mark.slow
def test_next_month_goes_on() -> None:
    module = example("next_month")
    assert lines(module.CONFIG + module.COMMANDS) <= 40
    found = module.main()
    assert min(found["may"], found["june"]) > max(0.8, found["one model"] + 0.05)
    assert found["predicted"] == 23 * 60


@pytest.mark.slow
def test_every_winner_can_be_served() -> None:
    found = example("serve_the_winner").main()
    assert all({"known", "new"} <= row.keys() for row in found.values())
    assert "stranger" not in found["fedrep"]  # its shared part has no head


@pytest.mark.slow
@pytest.mark.parametrize("winner", ["fine_tuned", "mixture", "fedrep", "furl"])
def test_every_winner_can_be_served_by_commands(winner: str) -> None:
    module = example("serve_the_winner")
    assert lines(example("next_month").CONFIG + module.COMMANDS + module.STRANGER) <= 40
    assert module.by_toml(winner).count("\nc30,") == 100  # one client's model, for all rows


@pytest.mark.slow
def test_a_task_gains_from_the_user_vector_of_another() -> None:
    found = example("multi_task").main()
    assert found["both tasks"] > found["clicks alone"] + 0.1


def test_private_factors_of_adapters_help_and_send_less() -> None:
    (shared, all_bytes), (private, few_bytes) = example("transformer_adapters").main().values()
    assert private > shared + 0.1
    assert few_bytes < 0.6 * all_bytes


ALONE = """
import sys, numpy, peft, torch
folder, rows = sys.argv[1:]
model = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
found = numpy.load(rows)
ids, mask = torch.from_numpy(found["ids"]), torch.from_numpy(found["mask"])
labels = ids.masked_fill(mask == 0, -100)
with torch.no_grad():
    print(float(torch.exp(model(input_ids=ids, attention_mask=mask, labels=labels).loss)))
assert "fedkeep" not in sys.modules
"""


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft's use of it
@pytest.mark.slow
def test_adapters_of_authors_stand_in_folders_that_peft_opens_alone(tmp_path: Path) -> None:
    """A process without fedkeep finds the perplexity of the new author's test sentences that fedkeep found."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    made = example("authors_to_peft")
    assert lines(inspect.getsource(made.main)) <= 40
    found = made.main(tmp_path)
    assert found["author-11, own"] < 0.8 * found["author-11, shared"]
    data = made.write(range(10, 12))
    rows = data.rows(data.index("author-11"), "test")
    columns = {"ids": data.columns["input_ids"][rows], "mask": data.columns["attention_mask"][rows]}
    np.savez(tmp_path / "rows.npz", **columns)
    words = [sys.executable, "-c", ALONE, str(tmp_path / "author-11"), str(tmp_path / "rows.npz")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(found["author-11, own"], rel=1e-4)


def test_recommendation_finds_the_users_films() -> None:
    found = example("recommendation").main()
    assert found["hr10"] > found["shared"] + 0.2


def lines(text: str) -> int:
    """Return how many lines a user writes."""
    return sum(bool(line.strip()) for line in text.splitlines())


@pytest.mark.slow
def test_a_folder_of_images_becomes_a_table_in_latex() -> None:
    module = example("images_to_latex")
    assert lines(module.NETWORK + module.CONFIG) + 1 <= 40  # and one command
    found = module.main()
    assert r"\begin{tabular}" in found
    rows = {row.split(" & ")[0]: row for row in found.splitlines() if " & " in row}
    norms, heads, one = (
        float(re.findall(r"([\d.]+) \$\\pm", rows[name])[0]) for name in ("FedBN", "FedRep", "FedAvg")
    )
    assert min(norms, heads) > one + 10


@pytest.mark.slow
def test_a_file_of_leafs_is_learned() -> None:
    module = example("leaf_format")
    assert lines(module.CONFIG) <= 10
    assert module.main() > 0.9


@pytest.mark.slow
def test_a_banks_table_needs_no_line() -> None:
    assert example("bank").main() > 0.9


@pytest.mark.slow
def test_a_series_is_split_by_date() -> None:
    found = example("time_series").main()
    assert found["early"] == 0
    assert found["rmse"] < 6  # counting each shop's days has 11.5


def test_ten_lines_of_a_training_script_change() -> None:
    module = example("training_script")
    before, after = (set(inspect.getsource(f).splitlines()) for f in (module.alone, module.together))
    assert len(after - before) <= 10
    found = module.main()
    assert found["a head for each clinic"] > found["one model"] + 0.3
