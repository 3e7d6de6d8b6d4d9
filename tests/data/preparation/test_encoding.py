"""Summaries and encodings: read strictly, independent of order, and clear about what does not fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, many_user_text, toy
from fedkeep.data.preparation import (
    About,
    Encoding,
    Features,
    KeyColumn,
    Labels,
    Plain,
    Raw,
    Ready,
    Rules,
    Summary,
    Texts,
    Times,
    agreeing,
    merged,
    prepared,
)
from tests.refusals import raises

RULES = Rules(clients_a_word=2, standardise=True)


def raw(client: str, words: str, labels: str, max_length: int = 5, **more: Any) -> Raw:
    """Return a source of one client, a letter a row."""
    rows = len(words)
    columns = {
        "text": Texts(values=list(words), tokens="word", size=9, max_length=max_length),
        "label": Labels(values=list(labels)),
        "x": Features(names=("f",), values=np.arange(rows, dtype=np.float32)[:, None] / 3),
        "item": KeyColumn(values=np.arange(rows) + ord(client)),
        "time": Times(values=np.arange(rows) / 2),
        "_words": Plain(values=np.ones(rows)),
    }
    return Raw(client=[client] * rows, split=None, columns=columns | more)


NODES = [raw("a", "uvu", "ppn"), raw("b", "vw", "nn"), raw("c", "www", "xxx")]
SUMMARIES = [node.summary(RULES) for node in NODES]


def test_the_order_of_summaries_changes_nothing() -> None:
    found = {Encoding.of(merged(order)).digest for order in itertools.permutations(SUMMARIES)}
    assert len(found) == 1
    nested = merged([merged(SUMMARIES[1:]), SUMMARIES[0]])
    assert Encoding.of(nested).digest in found
    encoding = Encoding.of(nested)
    assert encoding.meta["vocabulary"]["symbols"] == ["w", "v"]  # u is a's alone
    assert encoding.meta["label_names"] == ["n", "p", "x"]
    assert encoding.sizes == {"vocabulary": 4, "classes": 3, "items": 5, "features": 1}
    assert encoding.digest != Encoding.of(merged(SUMMARIES[:2])).digest


def test_a_summary_and_an_encoding_are_read_as_they_were_written() -> None:
    whole = merged(SUMMARIES)
    assert Summary.from_json(whole.to_json()) == whole
    encoding = Encoding.of(whole)
    again = Encoding.from_json(encoding.to_json().encode())
    assert again == encoding
    assert again.digest == encoding.digest
    assert Ready(data=toy()).summary() == Summary.from_json(Ready(data=toy()).summary().to_json())


def changed(*path: Any, to: Any = None) -> str:
    """Return the JSON of a summary with one value replaced, or taken out."""
    content = json.loads(merged(SUMMARIES).to_json())
    place = content
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(content)


TEXT = ("columns", "text")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no summary, or is damaged: Invalid JSON"),
        ("[1]", "is no summary, or is damaged: Input should be an object"),
        (changed("clients"), "clients: Field required"),
        (changed("clients", to="3"), "clients: Input should be a valid integer"),
        (changed("clients", to=0), "Wanted a client and a column at least"),
        (changed("columns", to={}), "Wanted a client and a column at least"),
        (changed("more", to=1), "more: Extra inputs are not permitted"),
        (changed("format", to=2), "s.json is no sound summary: wanted format 1."),
        (changed("what", to="encoding"), "s.json is no sound summary: wanted format 1."),
        (changed(*TEXT, "kind", to="texts"), "columns.text: Input tag 'texts'"),
        (changed(*TEXT, "note", to="hi"), "columns.text.text.note: Unexpected keyword argument"),
        (changed(*TEXT, "counts", "w", to=0), "Wanted counts of words of at least 1"),
        (
            changed(*TEXT, "counts", "w", to=1.5),
            "columns.text.text.counts.w: Input should be a valid integer",
        ),
        (changed(*TEXT, "clients", "w"), "Wanted for each word how many clients have it"),
        (changed(*TEXT, "clients", "w", to=4), "how many of 3 clients have it, or more than that"),
        (changed("clients_a_word", to=1), "how many of 3 clients have it, or more than that"),
        (changed("columns", "x", "sums", to=[]), "Wanted 1 sums of features"),
        (changed("columns", "x", "squares", to=[-1]), "Wanted 1 sums of features"),
        (changed("about", "vocabulary", to={"size": "9"}), "Wanted a vocabulary that tells its size"),
    ],
)
def test_a_summary_is_read_strictly(text: str, why: str) -> None:
    with pytest.raises(DataError) as error:
        Summary.from_json(text, "s.json")
    assert str(error.value).startswith("s.json is no ")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("column", "field", "value", "facts"),
    [
        ("text", "size", 9, {"what": "encoding"}),
        ("text", "symbols", ["v", "v"], {"what": "encoding"}),
        ("text", "tokens", "chars", {"said": "e.json is no encoding, or is damaged:"}),
        ("label", "names", ["n", "n"], {"what": "encoding"}),
        ("label", "names", [], {"what": "encoding"}),
        ("x", "means", [], {"what": "encoding"}),
        ("x", "scales", [0.0], {"what": "encoding"}),
        ("x", "scales", ["inf"], {"said": "e.json is no encoding, or is damaged:"}),
        ("item", "keys", [3, 3], {"what": "encoding"}),
        ("_words", "type", "float9", {"what": "encoding"}),
        ("_words", "type", "object", {"what": "encoding"}),
    ],
)
def test_an_encoding_is_read_strictly(column: str, field: str, value: Any, facts: dict[str, Any]) -> None:
    content = json.loads(Encoding.of(merged(SUMMARIES)).to_json())
    content["columns"][column][field] = value
    with raises(DataError, **facts):
        Encoding.from_json(json.dumps(content), "e.json")


def test_devices_that_differ_in_kind_are_left_out_by_name() -> None:
    other = raw("d", "uu", "pp", max_length=7).summary(RULES)
    plain = Summary(clients=1, clients_a_word=2, columns={"text": SUMMARIES[0].columns["text"]})
    for names in itertools.permutations(["n1", "n2", "odd", "bare"]):
        given = dict(zip(["n1", "n2", "odd", "bare"], [*SUMMARIES[:2], other, plain], strict=True))
        inside, refused = agreeing({name: given[name] for name in names})
        assert inside == merged(SUMMARIES[:2])
        assert refused == {
            "odd": "the column 'text' has max_length 7, not 5",
            "bare": "the column '_words' is missing",
        }
    large = dataclasses.replace(other, clients=3)
    assert agreeing({"n1": SUMMARIES[0], "n2": SUMMARIES[1], "odd": large})[1].keys() == {"n1", "n2"}
    with pytest.raises(DataError, match="the column 'text' has max_length 7, not 5"):
        merged([SUMMARIES[0], other])
    with pytest.raises(DataError, match="Wanted at least one summary; got none"):
        merged([])
    with pytest.raises(DataError, match="Wanted at least one summary; got none"):
        agreeing({})
    assert SUMMARIES[0].difference(NODES[0].summary(Rules(standardise=True))) == "clients_a_word 2, not 1"


def test_what_a_summary_reveals_is_said_in_plain_words() -> None:
    assert merged(SUMMARIES).describe() == (
        "What the summary of 3 clients together tells the server:\n"
        "  _words: numbers: their type (float64) and shape, nothing of their values.\n"
        "  item: which of the 5 items occur, not how often.\n"
        "  label: which labels there are, not how many of each: 'n', 'p', 'x'.\n"
        "  text: how often each of 3 words occurs in the texts to train on (most: 'w', 'u', 'v'), and how many clients "
        "have each: 1 only one. Rare words can point to a person.\n"
        "  time: times: whether all are whole numbers.\n"
        "  x: the names of features (1), and of each the sum and the sum of squares over 8 rows to train on. With a single "
        "row, these are its values.\n"
        "No example, no text and no client's traits or id is in it. No noise is added."
    )
    assert "\n  What the data say of themselves: task, classes.\n" in Ready(data=toy()).summary().describe()
    assert SUMMARIES[0].describe().endswith("so all of this is known of that client.")
    secure = SUMMARIES[0].describe(secure=True)
    assert "leaves in sums over devices alone" in secure
    assert "known of that client" not in secure


def test_nothing_undeclared_leaves() -> None:
    """A canary in every place of a source that has no business in a summary."""
    source = Raw(
        client=["CANARY"] * 2,
        split=["train", "test"],
        columns={
            "text": Texts(values=["seen", "CANARY"], tokens="word", size=9, max_length=5),
            "label": Labels(values=["CANARY", "CANARY"], names=("CANARIES", "CANARY")),
            "x": Features(names=("f",), values=np.array([[1.0], [4242.0]], np.float32)),
            "time": Times(values=np.array([4242.5, 4242.5])),
            "_words": Plain(values=np.array([4242, 4242])),
        },
        meta={"name": "CANARY", "traits": {"CANARY": ["CANARY"]}, "source": {"CANARY": "CANARY"}},
    )
    text = source.summary(Rules(label_names=("p",))).to_json()
    assert "CANARY" not in text
    assert "4242" not in text
    assert "seen" in text  # the search finds what it looks for


# -- data that are encoded already


def test_data_that_are_ready_stay_as_they_are() -> None:
    for data in (toy(classes=4, features=7), many_user_text(users=5)):
        made = prepared(Ready(data=data))
        assert made.fingerprint() == data.fingerprint()
        assert "encoding" not in data.meta
        assert {k: v for k, v in made.meta.items() if k != "encoding"} == data.meta
    assert Encoding.of(Ready(data=toy(classes=4, features=7)).summary()).sizes == {
        "classes": 4,
        "features": 7,
    }


def test_nodes_with_ready_data_get_the_classes_of_all() -> None:
    def node(client: str, labels: list[int], **meta: Any) -> Ready:
        x = np.ones((len(labels), 2), np.float32)
        return Ready(
            data=FederatedData.from_columns([client] * len(labels), {"x": x, "label": labels}, meta=meta)
        )

    nodes = [node("a", [0, 1]), node("b", [4, 0])]
    encoding = Encoding.of(merged(n.summary() for n in nodes))
    parts = [n.encoded(encoding) for n in nodes]
    assert [(p.meta["task"], p.meta["classes"]) for p in parts] == [("multiclass", 5)] * 2
    assert nodes[0].data.meta["classes"] == 2
    late = node("c", [5, 0])
    assert encoding.fault(late.summary()) == "there are 6 classes, more than 5"
    with pytest.raises(DataError, match="there are 6 classes"):
        late.encoded(encoding)
    named = node("d", [0, 1], label_names=["no", "yes"])
    assert encoding.fault(named.summary()) == "label_names ('no', 'yes'), not None"
    tasks = {"clicks": {"task": "binary", "label": "label"}}
    assert About(tasks=tasks).meta == {"tasks": tasks}


NEW = {
    "text": ["w w", "v"],
    "label": ["n", "x"],
    "x": [[3], [0.5]],
    "item": [99, 97],
    "time": [1, 2.5],
    "_words": [1, 2],
}


def test_new_examples_become_numbers_as_the_data_did() -> None:
    encoding = Encoding.of(merged(SUMMARIES))
    rows = replace_columns(NODES[0], client=["a", "a"], **NEW).encoded(encoding)
    wanted, found = rows.batch(range(2)), Encoding.from_json(rows.meta["encoded_by"]).batch(**NEW)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, wanted[name].float() if wanted[name].is_floating_point() else wanted[name]
        )
    assert found["x"].dtype == torch.float32
    assert found["text_length"].tolist() == [2, 1]
    assert "x" not in encoding.batch(text=["w"])
    assert rows.select([0]).split_per_user().meta["encoded_by"] == encoding.to_json()


def replace_columns(source: Raw, client: list[str], **values: Any) -> Raw:
    """Return a source with other rows."""
    given = {"x": np.float32(values["x"]), "item": np.array(values["item"]), "time": np.array(values["time"])}
    given["_words"] = np.ones(2) * values["_words"]
    columns = {
        name: dataclasses.replace(column, values=given.get(name, values[name]))  # type: ignore[type-var]
        for name, column in source.columns.items()
    }
    return Raw(client=client, split=None, columns=columns)


@pytest.mark.parametrize(
    ("columns", "facts"),
    [
        ({"y": [1]}, {"column": "y"}),
        (
            {"x": [[1, 2]]},
            {"shape": (1, 2)},
        ),
        ({"x": [["1"]]}, {"shape": (1, 1)}),
        ({"x": [[1], [2, 3]]}, {"said": "The column 'x': wanted numbers of shape (examples, 1) (the"}),
        ({"x": [[float("nan")]]}, {"column": "x", "row": 0}),
        (
            {"item": [1.5]},
            {"wanted": "The column 'item': wanted numbers of shape (examples)", "got": [1.5]},
        ),
        ({"item": [5]}, {"place": "item, row 0", "value": 5}),
        ({"text": "w"}, {"column": "text", "got": "w"}),
        ({"text": 3}, {"column": "text", "got": 3}),
        ({"label": ["q"]}, {"place": "label, row 0", "label": "q", "names": ["n", "p", "x"]}),
        (
            {"text": ["w"], "label": ["n", "n"]},
            {"wanted": 2, "column": "text", "whose": "the client ids", "got": 1},
        ),
        ({}, {"said": "Wanted at least one column; got none"}),
    ],
)
def test_new_examples_that_do_not_fit(columns: dict[str, Any], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        Encoding.of(merged(SUMMARIES)).batch(**columns)


def test_values_without_names_and_one_example_alone_are_told_their_form() -> None:
    encoding = Encoding.of(merged(SUMMARIES))
    with raises(DataError, said="by name", got="ndarray"):
        encoding.examples(np.zeros((2, 1)))  # type: ignore[arg-type]
    with raises(DataError, said="a list of one", shape=(1,)):
        encoding.batch(x=[1.0])
