"""What an audit goes by: the messages, asked again, and the findings so far. ``kept`` and ``examples`` look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.audit import audited_server as on_server
from fedkeep.audit.bench import FIRST, Bench, Items, Recorded, SentItem, changed, items, still
from fedkeep.audit.canaries import CanarySource, planted
from fedkeep.audit.canary_images import IN_LAST_BITS, describe_image
from fedkeep.audit.findings import Allowed, Finding, Leaving, Verdict
from fedkeep.audit.report import AuditReport
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params
from fedkeep.methods import Finish, Finished

MASKED = (
    "Uploads are looked at as they are before they are masked: types, bytes and rows of tables are those of unmasked "
    "ones. The server sees masked vectors, and their sum."
)
RANK: Sequence[Verdict] = ("gradients", "declared", "leak")


@dataclass(frozen=True)
class Noting:
    """A ``finish`` whose results are noted: the names of what it uploads in place of what was trained."""

    hook: Callable[[Finish], Finished]
    names: list[str]

    def __call__(self, done: Finish) -> Finished:
        """Return what the hook gives."""
        found = self.hook(done)
        self.names.extend(found.params)
        return found


@dataclass
class MessageStep:
    """A message that trains or judges.

    Attributes:
        work: the message.
        kept: what clients keep when it comes, by client.
        have: what leaves.
        have_still: what leaves when no federated parameter moves by gradients.
    """

    work: Packet
    kept: Mapping[str, Params]
    have: Items
    have_still: Items


class Looking:
    """An audit on its way.

    Args:
        bench: what is asked.
        allowed: the allow list.
        rounds: how many.
        wires: by name, what turns a message into the bytes that travel.
        masked: whether the method sums securely; it is looked at as it is without masks.

    Attributes:
        heard: all that went between the server and each node.
        data: of the device that is looked at.
        client, others: its clients: the one that canaries are planted at, and the rest.
        trainable, federated, buffers: names: of parameters, of those that are federated, and of federated buffers.
        still, frozen: the method with learning rates of zero for federated parameters, and for all.
        given: names that ``finish`` uploads in place of what was trained.
        steps: the messages that train or judge.
        findings: by what leaves and source.
        looked: what was looked at.
        notes: what the reader should know.
        missed: what could not be looked at.
        searched: by wire, how many bytes were searched for canaries.
    """

    def __init__(
        self,
        bench: Bench,
        allowed: Allowed,
        rounds: int,
        wires: Mapping[str, Callable[[Packet], bytes]],
        *,
        masked: bool = False,
    ) -> None:
        self.bench, self.allowed, self.rounds, self.wires, self.masked = bench, allowed, rounds, wires, masked
        self.searched: dict[str, int] = {}
        self.findings: dict[tuple[str, str], Finding] = {}
        self.looked: dict[str, None] = {}
        self.notes: dict[str, None] = {MASKED: None} if masked else {}
        self.left: dict[str, Leaving] = {}
        self.heard = bench.federate(rounds)
        heard = self.heard[FIRST]
        self.data = bench.device
        self.client, self.others = str(self.data.ids[0]), [str(name) for name in self.data.ids[1:]]
        module = bench.method.made_for(bench.model)
        halves = bench.method.split.halves(module)
        self.trainable = Net(module).trainable()
        self.federated = [n for n in halves.federated_names if n in self.trainable]
        self.buffers = {n for n in halves.federated_names if n not in self.trainable}
        self.still, self.frozen = (still(bench.method, names) for names in (self.federated, self.trainable))
        self.given = self._given([work for work, _ in heard.answered()])
        self._tell_what_left(heard)
        self.before = on_server.followed(bench, self.heard)
        self.steps = list(self._rounds(heard))
        if not any(order["train"] for step in self.steps for order in step.work.header["orders"]):
            why = self.bench.told[-1] if self.bench.told else "No client has an example to train on."
            raise MethodError(
                "No round of the audit could be run: {why}",
                why=why,
            )
        self.missed = dict.fromkeys(self._missed(heard))

    def planted(
        self, step: MessageStep, client: str, names: Iterable[str], seed: int = 1, scale: float = 1.0
    ) -> dict[str, Params]:
        """Return what clients keep, with canaries at one of them."""
        own = planted(step.kept[client], names, self.trainable, seed, scale)
        return {**step.kept, client: own}

    def base(self, name: str) -> str:
        """Return the federated parameter that an upload is of; a link may have added an ending."""
        known = [n for n in (*self.federated, *self.buffers) if name == n or name.startswith(f"{n}/")]
        return max(known, key=len, default=name)

    def note(
        self,
        label: str,
        source: str,
        how: str = "",
        *,
        of: Iterable[str] = (),
        of_client: bool = True,
        image: str = "",
        direct: bool = True,
    ) -> None:
        """Put down something that leaves beside gradients: declared, or a leak.

        Args:
            label: what leaves.
            source: what it changes with.
            how: what to say of it.
            of: the source's names in declarations.
            direct: see ``Allowed.by``.
            of_client: see ``Allowed.by``.
            image: what it is of its canary, in the place of ``how``.
        """
        copied = image not in ("", IN_LAST_BITS)
        by = self.allowed.by(label, of, of_client=of_client, copied=copied, direct=direct)
        verdict: Verdict = "declared" if by else "leak"
        self.put(Finding(leaves=label, source=source, verdict=verdict, how=how or image, by=by))

    def put(self, finding: Finding) -> None:
        """Put a finding down; of two on the same the worse one stays."""
        key = finding.leaves, finding.source
        old = self.findings.get(key)
        if old is None or RANK.index(finding.verdict) > RANK.index(old.verdict):
            self.findings[key] = finding

    def told_of(self, leaves: str, source: CanarySource) -> bool:
        """Tell whether it is declared, or found, that something tells of a source beside gradients."""
        old = self.findings.get((leaves, str(source)))
        found = old is not None and old.verdict != "gradients"
        return found or bool(self.allowed.by(leaves, source.declared, copied=True))

    def settled(self, leaves: str, source: CanarySource, *, direct: bool) -> bool:
        """Tell whether a finding is there that another one on the same cannot make worse.

        Args:
            leaves, source: of both.
            direct: whether the other one is of something that leaves beside gradients.
        """
        old = self.findings.get((leaves, str(source)))
        if old is None or not direct:
            return old is not None
        lasting = old.verdict == "declared" and bool(self.allowed.by(leaves, source.declared, copied=True))
        return old.verdict == "leak" or lasting

    def report(self, name: str, seconds: float) -> AuditReport:
        """Return the report."""
        messages: dict[str, tuple[int, int]] = {}
        for packet, (_, content) in zip(self.heard[FIRST].answers(), self.heard[FIRST].pairs, strict=True):
            count, size = messages.get(str(packet.header["kind"]), (0, 0))
            messages[str(packet.header["kind"])] = count + 1, size + len(content)
        order = {label: place for place, label in enumerate(self.left)}
        found = sorted(self.findings.values(), key=lambda f: order.get(f.leaves, len(order)))
        return AuditReport(
            name=name,
            rounds=self.rounds,
            clients=len(self.data),
            messages=messages,
            left=tuple(self.left.values()),
            findings=tuple(found),
            sources=tuple(self.looked),
            notes=tuple(self.notes),
            missed=tuple(self.missed),
            allow=self.allowed.entries,
            searched=self.searched,
            seconds=seconds,
        )

    def _given(self, works: Sequence[Packet]) -> set[str]:
        hook, names = self.bench.method.client.finish, list[str]()
        if hook is not None:
            noting = self.bench.method.on_client(finish=Noting(hook, names))
            for _ in self.bench.asked(works, method=noting):
                pass
        return set(names)

    def _missed(self, heard: Recorded) -> tuple[str, ...]:
        answers = [a for _, content in heard.answered() for a in Packet.from_bytes(content).header["answers"]]
        own = [a for a in answers if str(a["client"]) == self.client]
        if any(a["upload"] is not None for a in own):
            return ()
        kind, why = next((a["fault"] for a in own if a["fault"]), ("", "it was not asked to"))
        if kind == "failed":  # what its owner was told
            why = next((text for text in self.bench.told if repr(self.client) in text), why)
        return (f"what training sends, as client {self.client} never came through it: {why}",)

    def _rounds(self, heard: Recorded) -> Iterable[MessageStep]:
        """Yield the messages that train or judge, asked again; what leaves must be what left."""
        pairs = heard.answered()
        again = self.bench.asked([work for work, _ in pairs])
        for (work, content), (packet, kept) in zip(pairs, again, strict=True):
            have = items(packet)
            for item in changed(have, items(Packet.from_bytes(content))):
                self.note(
                    item.label,
                    "what was asked before, or chance",
                    "asked again it is another",
                    of_client=False,
                )
            yield MessageStep(work, dict(kept), have, self.bench.once(work, kept, method=self.still))

    def _tell_what_left(self, heard: Recorded) -> None:
        for packet in heard.answers():
            sizes: dict[tuple[str, str], int] = {}
            for item, value in items(packet).items():
                key = item.label, item.client
                sizes[key] = sizes.get(key, 0) + value.nbytes
                table = item.kind in ("judged", "counts", "summary", "status", "here")
                self.left[item.label] = Leaving(
                    label=item.label,
                    type="table" if table else str(value.dtype).removeprefix("torch."),
                    shape=() if table else tuple(value.shape),
                    bytes=sizes[key],
                    seen_by=self._seen_by(item),
                )

    def _seen_by(self, item: SentItem) -> str:
        if item.kind not in ("upload", "sent", "rows"):
            return "server"
        known = item.kind == "sent" or self.base(item.name) in (*self.federated, *self.buffers)
        return ("server (in a sum)" if self.masked else "server") + (
            "; clients (in the mean)" if known else ""
        )


def image_of(item: SentItem, canaries: np.ndarray, found: Sequence[Items]) -> str:
    """Say what something that left is of its canaries.

    Args:
        item: what.
        canaries: (draws, k), the first row is what stood there before.
        found: what left, for each draw.
    """
    first = found[0].get(item)
    if first is None or not first.is_floating_point() or not canaries.size:
        return ""
    if any(item not in one or one[item].shape != first.shape for one in found):
        return ""
    return describe_image(canaries, np.stack([one[item].double().reshape(-1).numpy() for one in found]))
