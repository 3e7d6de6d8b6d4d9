"""An example that has trained is never tested on in the same run, whatever becomes of its device's file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import StoreError
from fedkeep.data import SPLITS, FederatedData
from fedkeep.data.seen import Seen
from fedkeep.flower.served import federation_of
from fedkeep.remote import Packet
from fedkeep.remote.device_file import DeviceFile, FileHeader, create
from fedkeep.remote.node_config import build_node
from fedkeep.remote.own_data import settled
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import MemoryTransport


def made(rows: list[tuple[str, int]], opted_in: list[bool] | None = None) -> FederatedData:
    """Return examples (client, x), in the order of a file, divided as a configuration's data are."""
    columns = {"x": np.array([x for _, x in rows]), "label": np.array([x % 2 for _, x in rows])}
    if opted_in is not None:
        columns["opted_in"] = np.array(opted_in)
    return FederatedData.from_columns([client for client, _ in rows], columns).split_per_user()


def where(data: FederatedData) -> dict[str, list[tuple[str, int]]]:
    """Return by part which examples are there, sorted."""
    found: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    for client, name in enumerate(data.ids):
        for split in SPLITS:
            found[split] += [(name, int(data.columns["x"][row])) for row in data.rows(client, split)]
    return {split: sorted(each) for split, each in found.items()}


FIRST = [(client, 100 * k + x) for k, client in enumerate(("ann", "bob")) for x in range(30)]


def test_what_has_not_changed_is_the_very_same_object() -> None:
    data = made(FIRST)
    same, new, joined = settled(data, {})
    assert same is data
    assert joined == 0
    assert {c: len(n) for c, n in new.items()} == {"ann": 30, "bob": 30}
    again, more, joined = settled(made(FIRST), new)
    assert where(again) == where(data)
    assert not more
    assert joined == 0


@pytest.mark.parametrize("change", ["first", "last", "reversed", "one gone"])
def test_examples_stay_where_they_were(change: str) -> None:
    before = made(FIRST)
    known = settled(before, {})[1]
    more = [("ann", 1000 + k) for k in range(5)]
    rows = {
        "first": more + FIRST,
        "last": FIRST + more,
        "reversed": FIRST[::-1],
        "one gone": FIRST[:3] + FIRST[4:],
    }[change]
    drawn = made(rows)
    after, new, joined = settled(drawn, known)
    old, now = where(before), where(after)
    for split in SPLITS:
        assert set(now[split]) - set(more) == set(old[split]) & set(rows)
    assert joined == len(set(rows) & set(more)) == len(new.get("ann", {}))
    # The division by places would have tested what was trained on, which is what this is for.
    assert change == "last" or set(where(drawn)["test"]) & set(old["train"])


def test_what_was_gone_comes_back_to_its_part() -> None:
    before = made(FIRST)
    known = settled(before, {})[1]
    settled(made(FIRST[20:]), known)
    assert where(settled(made(FIRST[::-1]), known)[0]) == where(before)


def test_of_equal_examples_as_many_train_as_before() -> None:
    rows = [("ann", 7)] * 10 + [("ann", 8)] * 10
    before = made(rows)
    after = settled(made([("ann", 9), *rows]), settled(before, {})[1])[0]
    for split in SPLITS:
        for value in (7, 8):
            assert where(after)[split].count(("ann", value)) == where(before)[split].count(("ann", value))


@pytest.mark.parametrize("seed", range(20))
def test_a_device_divides_as_a_simulation_does(seed: int) -> None:
    """Also where of equal examples there are more, or fewer, than there were."""
    draw = np.random.default_rng(seed)
    rows = [(client, int(x)) for client in ("ann", "bob") for x in draw.integers(12, size=40)]
    more = [(client, int(x)) for client in ("ann", "eve") for x in draw.integers(15, size=30)]
    may = made(rows)
    june = made([(*more, *rows)[n] for n in draw.permutation(140)[:120]])
    kept = Seen.of(may).kept_apart(june)
    assert where(kept) != where(june)
    assert where(settled(june, settled(may, {})[1])[0]) == where(kept)


def test_who_opts_out_later_stays_in_train() -> None:
    before = made(FIRST, [True] * 60)
    after = settled(made(FIRST[::-1], [False] * 60), settled(before, {})[1])[0]
    assert where(after) == where(before)
    assert not after.columns["opted_in"].any()


def test_the_file_keeps_them_and_forgets_them(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    create(path, FileHeader(owner="ann", run="run", columns=[["user", "torch.float32", [2]]]))
    parts = {"ann": {b"12345678": 0, b"abcdefgh": 2}, "bob": {b"87654321": 1}}
    file = DeviceFile(path, "ann")
    file.put_parts(parts)
    assert file.parts() == parts
    file.forget(["bob"])
    assert file.parts() == {"ann": parts["ann"]}
    file.close()
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("UPDATE examples SET parts = ?", (b"12345678\x01abcdefgh\x02",))
    file = DeviceFile(path, "ann")
    with pytest.raises(StoreError, match="the parts of the examples of.*'ann'"):
        file.parts()
    file.close()


CONFIG = """
[model]
kind = "linear"
[method]
kind = "fedavg"
[preparation]
label_names = ["a", "b"]
[run]
rounds = 4
cohort = 2
"""


def test_a_device_whose_file_grows_from_the_top(tmp_path: Path) -> None:
    """Each message is served by a process of its own, as with Flower; a row comes in above before every one."""
    rows = [f"{client},{x / 1000},{'ab'[x % 2]}" for client, x in FIRST]
    (tmp_path / "node.toml").write_text(
        '[data]\nreader = "table"\npath = "mine.csv"\nfeatures = ["x"]\n[device]\nowner = "a"\nfolder = "states"\n'
    )
    trained, tested, said = set[int](), set[int](), list[str]()

    def serve(packet: Packet) -> Packet:
        rows.insert(0, f"ann,{-len(rows) / 1000},a")
        (tmp_path / "mine.csv").write_text("user,x,label\n" + "\n".join(rows) + "\n")
        node = build_node(tmp_path / "node.toml", said.append)
        try:
            answer = node.serve(packet)
            for running in node._runs.values():
                for split, seen in (("train", trained), ("test", tested)):
                    x = running.job.data.columns["x"]
                    seen |= {round(1000 * float(v)) for v in x[running.job.data.split_rows(split)].ravel()}
            return answer
        finally:
            node.close()

    federation = replace(federation_of(CONFIG), clients=2)
    serve_run(federation, MemoryTransport({"n": serve}), tmp_path / "run", progress=False)
    assert tested
    assert not trained & tested
    assert any("examples are new since the run began" in text for text in said)
