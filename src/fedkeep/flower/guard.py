"""What stands in for Flower's processes: on a device the installed ClientApp, and no code of a delivered bundle.

Flower unpacks a bundle, puts it first on the path and imports the app that it names, so a bundle with a module named
``fedkeep`` would be trusted with everything on the device. Here the bundle is checked for its signature and not even
unpacked. The node then trains what was signed, and no other experiment that a server names. ``fedkeep device run`` starts
Flower's node by this file, and its SuperExec and all that serves messages are forks of that (``stay``): no command runs
for a bundle, and other apps than a ClientApp are refused.

A link of ours runs programs of whoever may start them, and has no login. So it takes runs, and server apps, from its own
machine alone; other machines can be nodes. Its server apps are Flower's own, begun by this file for their signs of life.
Flower 1.41 starts another process where one was silent for 30 seconds, and to import Flower and torch takes longer on a busy
machine: each new process would make it busier still. So this is run as a file, and tells who has started it that it lives
before it imports anything but Python's own library; it ends as soon as nobody has a use for its answer.
"""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import os
import shlex
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TRUSTED = "FEDKEEP_TRUSTED"
"""Environment variable: the public keys whose projects are answered, separated as in ``PATH``."""
COMMAND, SERVER = "flwr-clientapp", "flwr-serverapp"
LINK, NODE, AT_LINK = "flower-superlink", "flower-supernode", "--at-link"
OF_NODES = ("/v1/fleet/", "/health")
"""What a link answers to other machines, by how the paths begin."""
EVERY = 10.0
"""Seconds between two signs of life: Flower's node or link waits 30 for the first, and 60 for each further one."""
LAST = 10.0
"""Seconds that a server app has left when the process that has started it is gone, as the link has ended."""
BEAT, TOKEN = "/v1/runtime/send-task-heartbeat", "flwr-task-token"
PROTOBUF = "application/protobuf"
_signed: dict[str, Any] = {}
"""``Node.signed`` of this process's message: nothing until a bundle has been found signed."""


def started_by(word: str) -> list[str]:
    """Return the command that runs this file for ``LINK``, ``NODE`` or ``AT_LINK``.

    Python's -P keeps files of a package's name in the folder that it runs in from being imported in its place.
    """
    return [sys.executable, "-P", os.path.abspath(__file__), word]


def install_at_link(folder: Path) -> None:
    """Write into a folder, which is to be the first of a link's ``PATH``, the command that starts server apps."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SERVER
    path.write_text(f'#!/bin/sh\nexec {shlex.join(started_by(AT_LINK))} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def main() -> None:
    """Be the process that the first argument names."""
    word = sys.argv.pop(1)
    if word == AT_LINK:
        _end_with_parent(os.getppid())
        _serve_at_link(_keep_alive(sys.argv[1:]))
        return
    if word == LINK:
        _link()
        return
    if word != NODE:
        sys.exit(f"There is no process {word!r} of a device.")
    from fedkeep.flower import stay

    stay.run_node(sys.argv[1:], serve)


def _link() -> None:
    from fedkeep.flower import inner

    create: Callable[..., Any] = inner.replace(
        inner.LINK, "create_app", lambda *given: closed_to_others(create(*given))
    )
    inner.run_link()


def closed_to_others(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers another machine ``OF_NODES`` alone, and this one whatever ``app`` does."""

    async def answer(scope: Mapping[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan" or scope["path"].startswith(OF_NODES) or _from_here(scope):
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 403, "headers": []})
        await send({"type": "http.response.body", "body": b"Runs are started on the link's machine alone."})

    return answer


def _from_here(scope: Mapping[str, Any]) -> bool:
    """Tell whether a request comes from this machine: it has the address that it is sent to, or a loopback's."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return False
    return client[0] == server[0] or ipaddress.ip_address(client[0]).is_loopback


def serve(words: Sequence[str]) -> None:
    """Serve a message by the installed ClientApp, in a process of its own; other apps of a bundle are refused."""
    if words[0] != COMMAND:
        sys.exit(f"This device runs fedkeep's ClientApp alone; {words[0]} was not started.")
    _serve(_keep_alive(words[1:]))


def _end_with_parent(parent: int) -> None:
    """End this process some seconds after its parent: what finished rounds left is durable, as after a kill.

    Flower asks its main thread to end, which may wait for a lock that its other threads hold while they call a link
    that is gone: for minutes, or until there is one again.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(LAST)
        _end("The link has ended, and so does this process.")

    threading.Thread(target=wait, daemon=True).start()


def _end(why: str) -> NoReturn:
    """End this process, whatever it is at: nothing that it does is of use, or harms what is durable."""
    from fedkeep.flower import stay

    stay.tell(why)
    os._exit(1)


def _serve_at_link(begun: threading.Event) -> None:
    """Run a server app as Flower does; from its own first sign of life on, ours are not needed.

    It is told of an answer before all of it has come, and asks for nothing else while it waits for the rest.
    """
    from fedkeep.flower import inner

    def begin_its_own(client: Any) -> Callable[[], bool]:
        begun.set()
        beat: Callable[[], bool] = begin(client)
        return beat

    inner.ask_again_after(inner.AGAIN_AFTER)
    begin = inner.replace(inner.SERVER, "make_task_heartbeat_fn_http", begin_its_own)
    inner.run_server_app()


def _serve(answered: threading.Event) -> None:
    from fedkeep.flower import inner

    inner.replace(inner.CLIENT, "install_from_fab", lambda content, **_: _check(content))
    inner.replace(inner.CLIENT, "get_project_dir", lambda *_: Path(os.devnull))
    inner.replace(inner.CLIENT, "get_load_client_app_fn", lambda **_: lambda *_: _app())

    def push_last(**told: Any) -> None:
        answered.set()  # after this message the node knows this process no more
        push(**told)

    push = inner.replace(inner.CLIENT, "push_task_output", push_last)
    inner.run_client_app()


def _keep_alive(words: Sequence[str]) -> threading.Event:
    """Tell who has started it that this process lives, now and until the returned event is set; end if not wanted."""
    parser, answered = argparse.ArgumentParser(allow_abbrev=False, add_help=False), threading.Event()
    for name in ("--runtime-api-address", "--token", "--root-certificates"):
        parser.add_argument(name)
    parser.add_argument("--insecure", action="store_true")
    given, _ = parser.parse_known_args(words)
    if not given.runtime_api_address or not given.token:  # Flower's own parser says what is wrong
        return answered
    trusted = None if given.insecure else ssl.create_default_context(cafile=given.root_certificates)

    def tell() -> None:
        if not wanted(given.runtime_api_address, given.token, trusted) and not answered.is_set():
            _end("Nobody waits for this process any more: it ends.")

    def go_on() -> None:
        while not answered.wait(EVERY):
            tell()

    tell()
    threading.Thread(target=go_on, daemon=True).start()
    return answered


def wanted(address: str, token: str, trusted: ssl.SSLContext | None = None) -> bool:
    """Send a node or link a sign of life; return whether it still waits for this process, or has not said.

    With ``trusted`` it speaks TLS, as a link does.
    """
    node = (
        http.client.HTTPConnection(address, timeout=EVERY)
        if trusted is None
        else http.client.HTTPSConnection(address, timeout=EVERY, context=trusted)
    )
    try:
        node.request("POST", BEAT, headers={"content-type": PROTOBUF, "accept": PROTOBUF, TOKEN: token})
        answer = node.getresponse()
        gone = answer.status == http.client.UNAUTHORIZED or (
            answer.status == http.client.OK and not answer.read()
        )
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):  # it is busy, too
        return True
    finally:
        node.close()
    return not gone


def _check(content: bytes) -> None:
    from fedkeep.flower.served import experiments_in
    from fedkeep.flower.signed import check_signed

    trusted = [Path(path) for path in os.environ.get(TRUSTED, "").split(os.pathsep) if path]
    _signed.update(experiments_in(check_signed(content, trusted)))


def _app() -> Any:
    from fedkeep.flower import client_app

    client_app.signed = _signed
    return client_app.app


if __name__ == "__main__":
    main()
