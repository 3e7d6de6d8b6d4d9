"""Scripted nodes for ``benchmarks.fleet_load``: they speak Flower's wire, and do without torch.

``python -m benchmarks.fleet_nodes ADDRESS COUNT LOOK FILE``. Each node registers, gives signs of life and looks for messages
every ``LOOK`` seconds, over connections of its own, as Flower's does every 3. The first message of a kind goes by standard output to
a real device, and its answer comes back by standard input. The other nodes' answers are that one with their own names,
and with a number of their own in every 64 KB of a large array, so that no two are the same bytes. ``FILE`` tells how they fare.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import struct
import sys
import zlib
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, TIMESTAMP_HEADER
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
from flwr.proto.node_pb2 import Node as Known
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

FIRST, PATIENCE, TRIES = "n00000", 30.0, 8
"""The device that answers; seconds until a call is given up, as Flower's node has them, and tries."""
CHECKSUM, STEP = 4, 1 << 16
PIECE, CONTENT = 5 << 20, "content"
"""As of ``fedkeep.flower.packet_records``, which loads torch."""
CHANCE = random.Random(0)  # noqa: S311 - no secrets
HELD = 256 << 20
"""Bytes of messages that all nodes hold at a time, as they share a machine here."""
TOLD: Any = {
    "joined": 0,
    "calls": Counter(),
    "faults": Counter(),
    "sent_bytes": 0,
    "received_bytes": 0,
    "answers": 0,
    "asked_in_vain": 0,
}


class LinkError(Exception):
    """The link answered with an error."""


class Line:
    """One connection to the link, opened when it is needed."""

    def __init__(self, address: str, headers: str) -> None:
        self.address, self.headers = address, headers
        self.private, public = generate_key_pairs()
        self.public = public_key_to_bytes(public)
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, path: str, message: Any, kind: Any) -> Any:
        """Return the link's answer; what fails on its way is tried again, a while later each time."""
        TOLD["calls"][path] += 1
        body = message.SerializeToString(deterministic=True)
        for again in range(TRIES):
            try:
                async with asyncio.timeout(PATIENCE):
                    status, content = await self._exchanged(path, body)
            except (TimeoutError, OSError, EOFError, asyncio.IncompleteReadError) as error:
                TOLD["faults"][f"{path}: {type(error).__name__}"] += 1
                self.close()
            else:
                if status == 200:
                    return kind.FromString(content)
                TOLD["faults"][f"{path}: {status}"] += 1
                if status not in (500, 502, 503, 504):
                    raise LinkError(f"{path}: {status} {content[:200]!r}")
            await asyncio.sleep(CHANCE.uniform(0.5, 1.0) * 2**again)
        raise LinkError(f"{path}: no answer {TRIES} times")

    async def _exchanged(self, path: str, body: bytes) -> tuple[int, bytes]:
        if self.streams is None or self.streams[0].at_eof():  # the link closes what was idle for seconds
            self.close()
            host, port = self.address.split(":")
            self.streams = await asyncio.open_connection(host, int(port))
        reader, writer = self.streams
        when = now().isoformat()
        signed = {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(self.public).decode(),
            TIMESTAMP_HEADER: when,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(self.private, when.encode())).decode(),
        }
        own = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        head = f"POST /v1/fleet/{path} HTTP/1.1\r\nhost: {self.address}\r\n{self.headers}{own}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        told = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        fields = dict(line.split(": ", 1) for line in told.splitlines()[1:] if ": " in line)
        content = await reader.readexactly(int(fields["content-length"]))
        TOLD["sent_bytes"] += len(head) + len(body)
        TOLD["received_bytes"] += len(told) + len(content)
        if fields.get("connection") == "close":
            self.close()
        return int(told.split()[1]), content

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


def packet_in(file: bytes) -> dict[str, Any]:
    """Return the header of fedkeep's packet in a safetensors file."""
    size = int.from_bytes(file[:8], "little")
    text = json.loads(file[8 : 8 + size])["__metadata__"]["packet"]
    header: dict[str, Any] = json.loads(text)["header"]
    return header


def with_name(file: bytes, old: str, new: str, number: int | None = None) -> bytes:
    """Return a packet's file with another client's name in its header, and a number in its large arrays."""
    size = int.from_bytes(file[:8], "little")
    head, data = file[8 : 8 + size].replace(old.encode(), new.encode()), bytearray(file[8 + size : -CHECKSUM])
    if number is not None:
        for name, entry in json.loads(head).items():
            if name != "__metadata__" and entry["dtype"] == "F32":
                start, end = entry["data_offsets"]
                for place in range(start, end if end - start >= STEP else start, STEP):
                    data[place : place + 4] = struct.pack("<f", number * 1e-7)
    made = file[:8] + head + data
    return made + zlib.crc32(made).to_bytes(CHECKSUM, "little")


def files_in(records: RecordDict) -> list[bytes]:
    """Return the files of fedkeep's packet that come in pieces: its own, and those beside it."""
    pieces = dict[str, list[bytes]]()
    for name, record in records.config_records.items():
        pieces.setdefault(name.rpartition("/")[0], []).append(cast(bytes, record[CONTENT]))
    return [b"".join(each) for each in pieces.values()]


def records_of(file: bytes) -> RecordDict:
    """Return a packet's own file in pieces."""
    starts = range(0, len(file), PIECE)
    pieces = [ConfigRecord({CONTENT: file[start : start + PIECE]}) for start in starts]
    return RecordDict({f"own/{n}": piece for n, piece in enumerate(pieces)})


class Device:
    """The real device behind the pipes: it answers each kind of message once."""

    def __init__(self, read: BinaryIO, write: BinaryIO) -> None:
        self.read, self.write, self.turn = read, write, asyncio.Lock()
        self.known: dict[tuple[Any, ...], bytes] = {}

    async def answer(self, name: str, number: int, files: list[bytes]) -> bytes:
        """Return what a node answers to a packet."""
        header = packet_in(files[0])
        key = header.get("kind"), header.get("round"), header.get("attempt")
        async with self.turn:
            if key not in self.known:
                asked = [with_name(files[0], name, FIRST), *files[1:]]
                self.known = {k: v for k, v in self.known.items() if k[0] != "work"}  # of an earlier round
                self.known[key] = await asyncio.to_thread(self._asked, asked)
        return with_name(self.known[key], FIRST, name, number)

    def _asked(self, files: list[bytes]) -> bytes:
        self.write.write(len(files).to_bytes(4, "little"))
        for file in files:
            self.write.write(len(file).to_bytes(8, "little") + file)
        self.write.flush()
        return self.read.read(int.from_bytes(self.read.read(8), "little"))


class Scripted:
    """One node."""

    def __init__(self, number: int, address: str, headers: str, device: Device) -> None:
        self.number, self.name, self.device = number, f"n{number:05d}", device
        self.line, self.heart = Line(address, headers), Line(address, headers)
        self.heart.private, self.heart.public = self.line.private, self.line.public

    async def live(self, door: asyncio.Semaphore, room: Room, look: float) -> None:
        """Join, and serve messages until the end."""
        key = self.line.public
        async with door:
            await self.line.call(
                "register-node",
                fleet_pb2.RegisterNodeFleetRequest(public_key=key),
                fleet_pb2.RegisterNodeFleetResponse,
            )
            hello = fleet_pb2.ActivateNodeRequest(
                public_key=key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
            )
            joined = await self.line.call("activate-node", hello, fleet_pb2.ActivateNodeResponse)
        self.known = Known(node_id=joined.node_id)
        TOLD["joined"] += 1
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                found = await self.line.call(
                    "pull-messages",
                    fleet_pb2.PullMessagesRequest(node=self.known),
                    fleet_pb2.PullMessagesResponse,
                )
                if found.messages_list:
                    async with room:
                        await self._serve(
                            message_from_proto(found.messages_list[0]), found.message_object_trees[0], room
                        )
                else:
                    await asyncio.sleep(CHANCE.uniform(0.8, 1.2) * look)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_DEFAULT_INTERVAL * CHANCE.uniform(0.7, 0.9))
            beat = heartbeat_pb2.SendNodeHeartbeatRequest(
                node=self.known, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
            )
            await self.heart.call("send-node-heartbeat", beat, heartbeat_pb2.SendNodeHeartbeatResponse)
            self.heart.close()

    async def _serve(self, message: Message, tree: Any, room: Room) -> None:
        run = message.metadata.run_id
        contents = {
            one.object_id: await self._pulled(run, one.object_id) for one in iterate_object_tree(tree)
        }
        room.fits(sum(map(len, contents.values())))
        received = message_pb2.ConfirmMessageReceivedRequest(
            node=self.known, run_id=run, message_object_id=tree.object_id
        )
        await self.line.call("confirm-message-received", received, message_pb2.ConfirmMessageReceivedResponse)
        whole: Any = inflate_object_from_contents(tree.object_id, contents)
        answer = await self.device.answer(self.name, self.number, files_in(whole.content))
        del whole, contents
        reply = Message(records_of(answer), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects = get_all_nested_objects(reply)
        pushed = await self.line.call(
            "push-messages",
            fleet_pb2.PushMessagesRequest(
                node=self.known,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[0.1],
            ),
            fleet_pb2.PushMessagesResponse,
        )
        for one in pushed.objects_to_push:
            content = message_pb2.PushObjectRequest(
                node=self.known,
                run_id=run,
                object_id=one,
                object_content=objects[one].deflate(),
                session_id=pushed.session_id,
            )
            await self.line.call("push-object", content, message_pb2.PushObjectResponse)
        TOLD["answers"] += 1

    async def _pulled(self, run: int, name: str) -> bytes:
        while True:
            asked = message_pb2.PullObjectRequest(node=self.known, run_id=run, object_id=name)
            found = await self.line.call("pull-object", asked, message_pb2.PullObjectResponse)
            if found.object_available:
                return bytes(found.object_content)
            TOLD["asked_in_vain"] += 1
            await asyncio.sleep(1.0)


class Room(asyncio.Semaphore):
    """How many nodes may hold a message at a time: at first a few, then as many as their size lets."""

    def __init__(self) -> None:
        super().__init__(4)
        self.places = 4

    def fits(self, size: int) -> None:
        """Take note of a message's size."""
        while self.places < min(64, HELD // max(1, 4 * size)):
            self.places += 1
            self.release()


async def told(file: Path, tasks: list[asyncio.Task[None]]) -> None:
    """Write now and then how the nodes fare."""
    while True:
        ended = [t for t in tasks if t.done()]
        reasons = Counter(str(t.exception())[:120] for t in ended)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        text = json.dumps({**TOLD, "ended": reasons, "peak_bytes": memory, "cpu": os.times().user})
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, file)
        await asyncio.sleep(1.0)


async def main(address: str, count: int, look: float, file: Path) -> None:
    """Run the nodes until this process is told to end."""
    about = RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata()
    usual = {"content-type": "application/protobuf", "accept": "application/protobuf", **dict(about)}
    headers = "".join(f"{name}: {value}\r\n" for name, value in usual.items())
    device = Device(sys.stdin.buffer, sys.stdout.buffer)
    door, room = asyncio.Semaphore(32), Room()
    nodes = [Scripted(number, address, headers, device) for number in range(count)]
    tasks = [asyncio.create_task(node.live(door, room, look)) for node in nodes]
    telling = asyncio.create_task(told(file, tasks))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, telling.cancel)
    await asyncio.wait([telling])


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4])))
