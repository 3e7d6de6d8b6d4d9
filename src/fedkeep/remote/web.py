"""A device's models over HTTP, for programs of the same machine: rows as JSON in, predictions as JSON out.

Whoever asks shows a token. A page of another site, which a browser of this machine may show, is refused by the headers
``Host`` and ``Origin``: it can neither read answers nor reach this server under a name of its own.
"""

from __future__ import annotations

import hmac
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedkeep.core.errors import ConfigError, FedkeepError, raising
from fedkeep.experiments.personalize.exported import Exported
from fedkeep.experiments.predicting import as_json, predict_table

PREDICT = "/predict"
MOST_BYTES, MOST_ROWS = 1 << 20, 10_000
"""Of one request."""
MOST_DIGITS = 12
"""Of a length that is told."""
SILENT = 10.0
"""Seconds that a connection may say nothing."""
LEAST_TOKEN = 16
FIELDS = {"rows", "client", "shared"}
HERE = ("127.0.0.1", "localhost", "[::1]")
SAFE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>fedkeep: predict</title>
<style>body { font: 16px sans-serif; max-width: 50em; margin: 2em auto } textarea, input { width: 100%; font: 14px monospace }
pre { background: #eee; padding: 1em; overflow: auto }</style>
<h1>Predict on this device</h1>
<p><label>Token <input id="token" type="password"></label></p>
<p><label>Rows, as JSON: a list with an object for each row
<textarea id="rows" rows="10">[{}]</textarea></label></p>
<p><label>Client (empty: as each row's column of users says) <input id="client"></label></p>
<p><button id="ask">Predict</button></p><pre id="said"></pre>
<script>
const at = (id) => document.getElementById(id);
at("token").value = location.hash.slice(1);
history.replaceState(null, "", "/");
at("ask").onclick = async () => {
  try {
    const asked = { rows: JSON.parse(at("rows").value) };
    if (at("client").value) asked.client = at("client").value;
    const said = await fetch("/predict", { method: "POST", body: JSON.stringify(asked),
      headers: { "Content-Type": "application/json", "Authorization": "Bearer " + at("token").value } });
    at("said").textContent = JSON.stringify(await said.json(), null, 2);
  } catch (error) { at("said").textContent = String(error); }
};
</script></html>
"""


class AskError(Exception):
    """A request is refused.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


def serve(
    models: Exported,
    token: str,
    *,
    port: int,
    host: str = HERE[0],
    only: str | None = None,
    shared: bool = False,
    most: int = MOST_BYTES,
) -> ThreadingHTTPServer:
    """Return a server that listens; ``serve_forever`` answers.

    Args:
        models: of this device's clients.
        token: what whoever asks shows; at least 16 characters.
        port: where it listens; 0: a free one.
        host: an address of this machine, by which it is also asked for.
        only: whose model predicts where a request names no client.
        shared: rows of users without a model are predicted by the shared part.
        most: bytes of a request.

    Raises:
        ConfigError: the token is too short, the address is none of this machine's, or the port is in use.
    """
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            "A token has at least {least_token} signs of ASCII without spaces; got {count} signs.",
            least_token=LEAST_TOKEN,
            count=len(token),
        )
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(
            "--host names one address of this machine, by which it is asked for; got {host!r}, which is all of them.",
            host=host,
        )

    class Handler(_Handler):
        """Answers for these models."""

    Handler.answer, Handler.token, Handler.most = PredictionQueue(models, only, shared), token, most
    with raising(
        ConfigError,
        "Nothing can listen at {host}:{port} ({why}). Name another with --port.",
        OSError,
        host=host,
        port=port,
    ):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        server: ThreadingHTTPServer = made((host, port), Handler)
    name = f"[{host}]" if ":" in host else host
    Handler.names = {f"{one}:{server.server_port}" for one in (*HERE, name)}
    return server


class PredictionQueue:
    """Predictions for requests, one after the other.

    Args:
        models: of this device's clients.
        only: whose model predicts where a request names no client.
        shared: as for ``predict_table``.
    """

    def __init__(self, models: Exported, only: str | None, shared: bool) -> None:
        self.models, self.only, self.shared, self._turn = models, only, shared, threading.Lock()

    def __call__(self, asked: Any) -> list[dict[str, Any]]:
        """Return a prediction for each row; raises AskError for what is wrong in a request."""
        rows, client, shared = _checked(asked, self.shared)
        if client is None and not shared:
            client = self.only
        with self._turn, TemporaryDirectory(prefix="fedkeep-") as place:
            file = Path(place) / "rows.jsonl"
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
            try:
                found = predict_table(self.models, file, client=client, shared=shared)
            except FedkeepError as error:
                why = str(error).replace(f"{place}/", "")
                raise AskError(HTTPStatus.UNPROCESSABLE_ENTITY, why) from error
        return [as_json(row) for row in found]


def _checked(asked: Any, shared: bool) -> tuple[Sequence[Mapping[str, Any]], str | None, bool]:
    wrong = HTTPStatus.BAD_REQUEST
    if not isinstance(asked, dict) or not isinstance(asked.get("rows"), list):
        raise AskError(wrong, 'A request is {"rows": [{...}, ...]}, with "client" or "shared" where wanted.')
    if unknown := sorted(set(asked) - FIELDS):
        raise AskError(wrong, f"A request has {', '.join(sorted(FIELDS))}; got {unknown[0][:80]!r}.")
    rows, client, by_shared = asked["rows"], asked.get("client"), asked.get("shared", shared)
    if not rows or not all(isinstance(row, dict) and row for row in rows):
        raise AskError(wrong, "rows wants at least one object, each with a value for every column.")
    if len(rows) > MOST_ROWS:
        raise AskError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{len(rows)} rows; at most {MOST_ROWS}.")
    if (client is not None and not isinstance(client, str)) or not isinstance(by_shared, bool):
        raise AskError(wrong, "client is a text, shared is true or false.")
    if client is not None and by_shared:
        raise AskError(wrong, "client names the model of every row; leave out shared.")
    return rows, client, by_shared


class _Handler(BaseHTTPRequestHandler):
    answer: Callable[[Any], list[dict[str, Any]]]
    token: str
    names: set[str]
    most: int
    timeout = SILENT
    server_version, sys_version = "fedkeep", ""

    def do_GET(self) -> None:
        self._say(self._page)

    def do_POST(self) -> None:
        self._say(self._predictions)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what is asked for are people's rows."""

    def _page(self) -> tuple[str, bytes]:
        if self.path != "/":
            raise AskError(HTTPStatus.NOT_FOUND, f"There is the page / and POST {PREDICT}.")
        return "text/html; charset=utf-8", PAGE.encode()

    def _predictions(self) -> tuple[str, bytes]:
        if self.path != PREDICT:
            raise AskError(HTTPStatus.NOT_FOUND, f"There is the page / and POST {PREDICT}.")
        shown = self.headers.get("Authorization", "")
        if not hmac.compare_digest(shown.encode("latin-1", "replace"), f"Bearer {self.token}".encode()):
            raise AskError(
                HTTPStatus.UNAUTHORIZED, "The header Authorization: Bearer TOKEN is missing or wrong."
            )
        if self.headers.get_content_type() != "application/json":
            raise AskError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Content-Type is to be application/json.")
        return "application/json", json.dumps({"predictions": self.answer(self._asked())}).encode()

    def _asked(self) -> Any:
        told = self.headers.get("Content-Length", "")
        if not (told.isascii() and told.isdigit()) or "Transfer-Encoding" in self.headers:
            raise AskError(HTTPStatus.LENGTH_REQUIRED, "A request tells its Content-Length.")
        if len(told) > MOST_DIGITS or int(told) > self.most:
            raise AskError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"A request has at most {self.most} bytes; got {told[:20]}.",
            )
        content = self.rfile.read(int(told))
        try:
            return json.loads(content, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise AskError(HTTPStatus.BAD_REQUEST, "The request's body is no JSON.") from error

    def _check_names(self) -> None:
        if (host := self.headers.get("Host", "")) not in self.names:
            raise AskError(HTTPStatus.FORBIDDEN, f"This server has another name than {host[:80]!r}.")
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self.names:
            raise AskError(HTTPStatus.FORBIDDEN, f"A page of {origin[:80]!r} may not ask here.")

    def _say(self, made: Callable[[], tuple[str, bytes]]) -> None:
        status, self.close_connection = HTTPStatus.OK, True
        try:
            self._check_names()
            kind, content = made()
        except AskError as error:
            status, kind = error.status, "application/json"
            content = json.dumps({"error": str(error)}).encode()
        except Exception:  # noqa: BLE001  a fault in a model of the user's own; its text may hold data
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "application/json"
            content = json.dumps({"error": "It has failed; its own log says more."}).encode()
            sys.excepthook(*sys.exc_info())
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **SAFE}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
