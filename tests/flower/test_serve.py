"""``fedkeep device serve``: predictions over HTTP, for whoever shows the token, and no page of another site."""

import csv
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.flower.publishing import models_of
from fedkeep.remote import web
from tests.flower.test_published import Hospitals, device

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Yield a server over a trained hospital's models: how to ask it, and where the hospital is."""
    folder = tmp_path_factory.mktemp("serve")
    hospitals = Hospitals(folder, 'kind = "furl"')
    hospitals.train()
    home = folder / "north"
    models = models_of(home / "node.toml", hospitals.publish())
    with (
        models.opened() as exported,
        web.serve(exported, TOKEN, port=0, only=models.only, most=4000) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(home=home, port=server.server_port, exported=exported)
        server.shutdown()


def ask(place, body=b"", verb="POST", path="/predict", **headers):
    """Return the status and the content of an answer, and its headers; a header that is None is left out."""
    own = {
        "Host": f"127.0.0.1:{place.port}",
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    line = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    line.putrequest(verb, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {**own, **{n.replace("_", "-"): v for n, v in headers.items()}}.items():
        if value is not None:
            line.putheader(name, value)
    line.endheaders(body)
    answer = line.getresponse()
    content = answer.read()
    line.close()
    return answer.status, content, answer.headers


def rows_of(place):
    with open(place.home / "new.csv") as file:
        return [{**row, "age": float(row["age"]), "dose": float(row["dose"])} for row in csv.DictReader(file)]


def right(place, **more):
    return json.dumps({"rows": rows_of(place), **more}).encode()


@pytest.mark.parametrize("named", [{}, {"client": "north"}])
def test_answers_are_those_of_device_predict(named, place):
    wanted = device(place.home, "predict", "--data", place.home / "new.csv", "--json")
    assert wanted.exit_code == 0, wanted.output
    status, content, headers = ask(place, right(place, **named))
    assert (status, headers.get_content_type()) == (200, "application/json")
    assert json.loads(content)["predictions"] == [json.loads(line) for line in wanted.stdout.splitlines()]


def test_the_page_needs_no_token_and_holds_nothing_of_the_device(place):
    status, content, headers = ask(place, verb="GET", path="/", Authorization=None)
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert content.decode() == web.PAGE
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer another-token-of-it"}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": "Bearer \xe9"}, 401),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": None}, 403),
        ({"Host": "127.0.0.1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": "4001"}, 413),
        ({"Content_Length": "9" * 5000}, 413),
        ({"path": "/other"}, 404),
        ({"verb": "GET"}, 404),
        ({"verb": "PUT"}, 501),
    ],
)
def test_what_may_not_ask_gets_no_prediction(headers, status, place):
    found, content, _ = ask(place, right(place)[:4000], **headers)
    assert found == status
    assert b"predictions" not in content


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_its_own_page_may_ask_by_each_of_its_names(name, place):
    own = f"{name}:{place.port}"
    assert ask(place, right(place), Host=own, Origin=f"http://{own}")[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
        (b"[" * 3000, 400, "no JSON"),
        (b"\xff", 400, "no JSON"),
        (b'{"rows": [{"age": NaN}]}', 400, "no JSON"),
        (b"[]", 400, "A request is"),
        (b'{"rows": {}}', 400, "A request is"),
        (b'{"rows": []}', 400, "at least one"),
        (b'{"rows": [1]}', 400, "at least one"),
        (b'{"rows": [{}]}', 400, "at least one"),
        (b'{"rows": [{"age": 1}], "user": 2}', 400, "user"),
        (b'{"rows": [{"age": 1}], "client": 2}', 400, "client is a text"),
        (b'{"rows": [{"age": 1}], "client": "north", "shared": true}', 400, "leave out shared"),
        (b'{"rows": [{"age": 1}]}', 422, "dose"),
        (b'{"rows": [{"age": "old", "dose": 1}]}', 422, "rows.jsonl"),
        (b'{"rows": [{"age": [1], "dose": {"a": 1}}]}', 422, "rows.jsonl"),
        (b'{"rows": [{"age": 1, "dose": 1}], "client": "south"}', 422, "south"),
    ],
)
def test_what_is_wrong_in_a_request_is_said(body, status, said, place):
    found, content, _ = ask(place, body)
    assert (found, list(json.loads(content))) == (status, ["error"])
    assert said in json.loads(content)["error"]
    assert str(place.home.parent.parent) not in content.decode()
    assert ask(place, right(place))[0] == 200  # it goes on


def test_a_model_that_fails_is_told_without_its_words(place, monkeypatch, capsys):
    def fail(*_, **__):
        raise ValueError("anna is 41")

    monkeypatch.setattr(web, "predict_table", fail)
    status, content, _ = ask(place, right(place))
    assert (status, b"anna" in content) == (500, False)
    assert "anna is 41" in capsys.readouterr().err


def test_too_many_rows_are_refused(place):
    with pytest.raises(web.AskError) as caught:
        web.PredictionQueue(place.exported, "north", shared=False)({"rows": [{"age": 1}] * 10_001})
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token": "short"}, "at least 16"),
        ({"token": "a token with some spaces"}, "without spaces"),
        ({"host": "0.0.0.0"}, "one address"),
        ({"host": ""}, "one address"),
        ({"host": "192.0.2.1"}, "Nothing can listen"),
        ({"port": "taken"}, "--port"),
    ],
)
def test_what_it_cannot_serve_by_is_refused(changes, said, place):
    given = {"token": TOKEN, "port": 0, **changes}
    given["port"] = place.port if given["port"] == "taken" else given["port"]
    with pytest.raises(ConfigError, match=said):
        web.serve(place.exported, **given)


def test_a_token_that_is_missing_is_told_in_one_line(place):
    said = device(place.home, "serve", "--token-file", place.home / "none")
    assert said.exit_code == 2
    assert "There is no token in" in said.stderr


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(number, place, tmp_path):
    command = [
        sys.executable,
        "-m",
        "fedkeep",
        "device",
        "serve",
        str(place.home / "node.toml"),
        "--port",
        "0",
    ]
    given = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given) as process:
        try:
            shown = next(line for line in process.stdout if line.startswith("http://"))
            address, _, token = shown.strip().removeprefix("http://").partition("/#")
            there = SimpleNamespace(port=int(address.rpartition(":")[2]))
            assert ask(there, right(place), Authorization=f"Bearer {token}")[0] == 200
            assert ask(there, right(place))[0] == 401
        finally:
            process.send_signal(number)
        assert process.wait(30) == 0
    assert list(tmp_path.glob("fedkeep-*")) == []  # copies of private values
