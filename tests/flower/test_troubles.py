"""What a run's events say of trouble, whatever a full disk or a kill has left of them."""

import json

from fedkeep.flower.local_federation import troubles


def line(text, kind="late"):
    return json.dumps({"seconds": 1.0, "round": 0, "kind": kind, "text": text, "node": "", "client": ""})


def test_trouble_is_told_in_its_order_and_the_rest_is_not(tmp_path):
    (tmp_path / "events.jsonl").write_text(
        "\n".join([line("one"), line("two", "joined"), line("three")]) + "\n"
    )
    assert troubles(tmp_path) == ["one", "three"]
    assert troubles(tmp_path / "none") == []


def test_a_line_that_was_cut_short_is_passed_over(tmp_path):
    lines = [line("one"), line("two")[:-20], line("three"), '{"kind": "late"}', "7", "", line("four")[:3]]
    (tmp_path / "events.jsonl").write_text("\n".join(lines))
    assert troubles(tmp_path) == ["one", "three"]


def test_a_character_that_was_cut_is_passed_over(tmp_path):
    whole = (line("one") + "\n").encode()
    (tmp_path / "events.jsonl").write_bytes(whole + '{"text": "ü'.encode()[:-1] + b"\n" + whole)
    assert troubles(tmp_path) == ["one", "one"]
