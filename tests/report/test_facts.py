import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep import Phase, methods, simulate
from fedkeep.privacy import TopK
from fedkeep.report import facts
from fedkeep.report.groups import Configuration, configurations
from fedkeep.report.runs import read_run
from fedkeep.report.stored_analyses import sections
from fedkeep.report.text_tables import TextTable
from tests.tiny import Logits, classes

Write = Callable[..., Path]


def test_nested_settings_are_written_flat() -> None:
    settings = {
        "model": {"sizes": [1, 20000], "dropout": 0.1, "pooled": True},
        "rates": [{"a": 1}],
        "none": None,
        "empty": [],
        "seed": 12345,
        "hash": "ab" * 32,
        "text": "",
    }
    assert dict(facts.flat(settings)) == {
        "model.sizes": "1, 20,000",
        "model.dropout": "0.1",
        "model.pooled": "yes",
        "rates.0.a": "1",
        "none": "–",
        "empty": "none",
        "seed": "12345",
        "hash": "abababababababab…",
        "text": "(empty)",
    }


def test_totals_count_every_client_of_a_round(write_run: Write) -> None:
    (table,) = facts.traffic(configurations([read_run(write_run())]))
    # 6 rounds recorded: 10 clients x 21,504 bytes, 2.5 s, 4 ms of them aggregation, and 1.5 s of judging
    assert table.rows == (
        ("Personalized FL", "21.5 kB", "21.5 kB", "128 B", "1.3 MB", "1.3 MB", "4 ms", "24.0 s"),
    )


def test_bytes_of_a_client_and_round_are_those_that_travelled(tmp_path: Path) -> None:
    """They were the federated parameters' size, whatever else was sent, and however it was encoded."""
    phase = Phase(batch_size=4)
    sparse = methods.furl("user", local=phase).but(upload=(TopK(0.25),))
    runs = {"scaffold": methods.scaffold(local=phase), "sparse": sparse}
    for name, method in runs.items():
        simulate(Logits(), method, classes(), rounds=2, cohort=4, name=name, out=tmp_path / name)
    (table,) = facts.traffic(configurations([read_run(tmp_path / name) for name in runs]))
    # 15 numbers of 4 bytes, and a control of 15 numbers beside them
    assert table.rows[0][1:3] == ("120 B", "120 B")
    # 12 numbers come; the largest 3 leave, each with a place of 4 bytes
    assert table.rows[1][1:3] == ("48 B", "24 B")


def test_pooled_training_has_no_traffic(write_run: Write) -> None:
    folder = write_run(centralised=True, bytes_up=None, bytes_down=None)
    (table,) = facts.traffic(configurations([read_run(folder)]))
    assert table.rows[0][1:3] == ("centralised", "centralised")


def test_halves_are_added_up(write_run: Write) -> None:
    (table,) = facts.split(configurations([read_run(write_run())]))
    assert table.note == "Together: federated 21.5 kB, private 128 B."
    assert table.rows[-1] == ("user", "private", "32", "128 B")


def test_seeds_of_a_group_are_listed(write_run: Write) -> None:
    groups = configurations([read_run(write_run("a", seed=3)), read_run(write_run("b", seed=5))])
    (table,) = facts.configuration(groups)
    assert ("seed", "3, 5") in table.rows


def test_what_differs_between_runs_that_were_called_is_shown(write_run: Write) -> None:
    """They have no configuration; the page said nothing of them."""
    rates = [{"seed": 3, "cohort": 5, "method": {"rate": rate}} for rate in (0.1, 0.5)]
    folders = [
        write_run(name, seed=3, config={"": {}}, identity=identity)
        for name, identity in zip("ab", rates, strict=True)
    ]
    differ, same = facts.configuration(configurations([read_run(f) for f in folders]))
    assert isinstance(differ, TextTable)
    assert isinstance(same, TextTable)
    assert (differ.title, differ.rows) == ("What differs", (("method.rate", "0.1", "0.5"),))
    assert same.rows == (("seed", "3"), ("cohort", "5"))


@pytest.mark.parametrize("of", ["data", "frozen", "trained"])
def test_what_differs_beyond_the_configuration_is_shown(write_run: Write, of: str) -> None:
    folders = [
        write_run(
            name,
            seed=3,
            data={"name": "x", "fingerprint": {"columns": {"image": value if of == "data" else "0"}}},
            initial={
                "frozen": {"t": value if of == "frozen" else "0"},
                "trained": {"w": value if of == "trained" else "0"},
            },
        )
        for name, value in (("a", "12"), ("b", "34"))
    ]
    differ = next(iter(facts.configuration(configurations([read_run(f) for f in folders]))))
    ((name, one, two),) = differ.rows
    assert (
        name == {"data": "data.hashes.columns.image", "frozen": "frozen.t", "trained": "initial values"}[of]
    )
    assert one != two


def test_cold_start_that_measured_nothing_is_a_table(write_run: Write) -> None:
    analyses = {
        "cold_start": {"k": [0, 1], "mean": [None, None]},
        "aggregation_time": {"cohort": [1, 2], "seconds": [0.5, None]},
    }
    cold, timed = sections(configurations([read_run(write_run(analyses=analyses))]))
    assert cold.blocks[0].rows == (("Accuracy", "–", "–"),)
    figure = timed.blocks[0]
    assert figure.table.rows == (("1", "500 ms", "500 ms"),)


def test_cold_start_beside_the_most_frequent_label_and_its_changes(write_run: Write) -> None:
    ways = [{"name": "fitted", "mean": [0.2, 0.5]}, {"name": "most frequent", "mean": [None, 0.4]}]
    found = {"k": [0, "all"], "series": ways, "changes": [None, [0.3, -0.01, 0.61]]}
    (section,) = sections(configurations([read_run(write_run(analyses={"cold_start": found}))]))
    figure = section.blocks[0]
    assert figure.table.rows == (
        ("fitted", "20.0 %", "50.0 %"),
        ("most frequent", "–", "40.0 %"),
        ("change from the k before (95 %)", "–", "+30.0 points (−1.0 to +61.0)"),
    )


def test_plain_tables_write_fractions_in_percent_where_the_heading_says_so(write_run: Write) -> None:
    columns = ["name", "valid accuracy", "AUC", "weight"]
    analyses = {"sweep": {"columns": columns, "rows": [["a", 0.5, 57.2, 0.5], ["b", None, 60.0, 2]]}}
    (section,) = sections(configurations([read_run(write_run(analyses=analyses))]))
    table = section.blocks[0]
    assert table.rows == (("a", "50.0 %", "57.2", "0.5"), ("b", "–", "60", "2"))
    assert table.left == 1


def client(*phases: tuple[int, int | None], turns: Any = "phases") -> dict[str, Any]:
    """What run.json says of a method whose phases have so many passes, or steps, in mini-batches of 8."""
    own = [{"epochs": epochs, "steps": steps, "batch_size": 8} for epochs, steps in phases]
    return {"method": {"client": {"phases": own, "turns": turns}}}


def test_unequal_local_steps_are_said(write_run: Write) -> None:
    def groups(*each: dict[str, Any]) -> list[Configuration]:
        folder = next(folders)
        return configurations(
            [read_run(write_run(f"{folder}/{k}", name=f"m{k}", identity=own)) for k, own in enumerate(each)]
        )

    folders = itertools.count()

    assert facts.unequal_work(groups(client((1, None)), client((1, None), turns=[1]))) == ""
    assert facts.unequal_work(groups(client((1, None)), {})) == ""
    said = facts.unequal_work(
        groups(client((1, None)), client((10, None), (1, None)), client((1, 4), turns=[3]))
    )
    assert said.endswith(
        "m0: 1 pass in mini-batches of 8; m1: 11 passes in mini-batches of 8; m2: 12 steps in mini-batches of 8."
    )


def test_clients_that_no_round_drew_are_named(write_run: Write) -> None:
    never = {"count": 7, "ids": [f"u{k}" for k in range(7)]}
    runs = [
        read_run(write_run(f"{name}{seed}", name=name, seed=seed, **more))
        for name in ("a", "b")
        for seed, more in ((0, {"never_drawn": never}), (1, {}))
    ]
    (said,) = facts.never_drawn(configurations(runs))
    assert said.startswith("a, b, seed 0: 7 clients never drawn (u0, u1, u2, u3, u4 and 2 more).")


def test_clients_that_missed_rounds_are_named(write_run: Write) -> None:
    lines = ["south took part in 2 of 6 rounds."]
    runs = [
        read_run(write_run(name, name=name, **more))
        for name, more in (("a", {"attendance": lines}), ("b", {}))
    ]
    assert [*facts.attendance(configurations(runs))] == ["a, seed 0: south took part in 2 of 6 rounds."]
