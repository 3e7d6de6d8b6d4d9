"""The upload chain: links one after the other, their states in one flat dictionary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params, misfit, nonfinite, prefixed, under
from fedkeep.privacy.draws import Draws, RunDraws
from fedkeep.privacy.link import Link

REPORT = "report/"


@dataclass(frozen=True)
class Chain:
    """Links that an upload goes through.

    States, and what the server sends, are flat: ``name`` of the link of number k is ``k/name``; on the wire its
    report's ``name`` is ``report/k/name``.

    One round, in order: ``sent`` on the server; on each client ``encode``, with the state of its last round that was
    accepted, or ``client_state``; on the server ``decode`` for each upload, sums of the reports of those that are
    accepted (``total``), and ``update`` once.

    Args:
        links: in the order of encoding.
    """

    links: tuple[Link, ...] = ()

    @property
    def rowwise(self) -> bool:
        """Tell whether every link is: clients may then leave out table rows that they don't use."""
        return all(link.rowwise for link in self.links)

    def client_state(self, shapes: Params) -> Params:
        """Return a new client's states.

        Args:
            shapes: the federated parameters.

        Raises:
            ConfigError: a link cannot take what it would be given.
        """
        return _flat({k: link.client_state(given) for k, link, given in self._tried(shapes)})

    def server_state(self, shapes: Params) -> Params:
        """Return the server's states before the first round; as for ``client_state``."""
        return _flat({k: link.server_state(given) for k, link, given in self._tried(shapes)})

    def sent(self, state: Params) -> Params:
        """Return what the server sends every client of a round, given its states."""
        return _flat({k: link.sent(_of(state, k)) for k, link in enumerate(self.links)})

    def encode(
        self,
        tensors: Params,
        start: Params,
        draws: Draws,
        state: Params | None = None,
        sent: Params | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> tuple[Params, Params]:
        """Return what leaves the client, reports included, and its new states.

        Args:
            tensors: changes by federated name, tables cut to the rows that are uploaded.
            start: the federated parameters as received, cut likewise.
            draws: the client's random numbers of this round.
            state: the client's states, whole; they are not changed.
            sent: what the server sent of the links' states.
            rows: by table, the numbers of the rows that ``tensors`` hold of it.
        """
        found, reports, rows = dict(state or {}), Params(), rows or {}
        for k, link in enumerate(self.links):
            before = _of(state or {}, k)
            cut = {n: v[rows[n].to(v.device)] if n in rows else v for n, v in before.items()}
            made = link.encode(tensors, start, draws.link(k), cut, _of(sent or {}, k))
            tensors = made.tensors
            reports |= prefixed(f"{REPORT}{k}/", made.report)
            for name, value in made.state.items():
                found[f"{k}/{name}"] = _put(before[name], rows[name], value) if name in rows else value
        return {**tensors, **reports}, found

    def decode(self, tensors: Params, start: Params, sent: Params | None = None) -> tuple[Params, Params]:
        """Return changes by federated name, and the client's reports, from what arrived.

        Args:
            tensors: what arrived.
            start: as for ``encode``.
            sent: what this client was sent of the links' states.

        Raises:
            UploadError: what arrived is not what the chain makes.
        """
        reports = under(REPORT, tensors)
        unknown = [n for n in reports if n.partition("/")[0] not in map(str, range(len(self.links)))]
        if unknown:
            raise UploadError(
                "{report!r} is of no link",
                report=REPORT + unknown[0],
            )
        if (name := nonfinite(reports)) is not None:
            raise UploadError(
                "{report!r} holds a NaN or an infinity",
                report=REPORT + name,
            )
        tensors = {n: v for n, v in tensors.items() if not n.startswith(REPORT)}
        for k, link in reversed(list(enumerate(self.links))):
            link.check_report(_of(reports, k))
            tensors = link.decode(tensors, start, _of(sent or {}, k))
        return tensors, reports

    @staticmethod
    def total(reports: Params, more: Params) -> Params:
        """Return the sums of two clients' reports, or of sums; an absent one is 0."""
        return {
            n: reports[n] + more[n] if n in reports and n in more else (reports | more)[n]
            for n in reports | more
        }

    def update(self, state: Params, reports: Params, count: int) -> Params:
        """Return the server's states after a round.

        Args:
            state: before it.
            reports: sums over the clients that were accepted.
            count: how many; with none the states stay.
        """
        if not count:
            return state
        new = {k: link.update(_of(state, k), _of(reports, k), count) for k, link in enumerate(self.links)}
        found = _flat(new)
        fault = misfit(state, found)
        if fault:
            raise ValueError(f"A link's server state may not change its names or shapes: {fault}.")
        return found

    def _tried(self, shapes: Params) -> Iterator[tuple[int, Link, Params]]:
        """Yield each link with what it is given when nothing has changed: one that cannot take it says so now."""
        start = {n: v.detach() for n, v in shapes.items()}
        tensors, draws = {n: torch.zeros_like(v) for n, v in start.items()}, RunDraws(0, "", 0)
        for k, link in enumerate(self.links):
            yield k, link, tensors
            sent = link.sent(link.server_state(tensors))
            tensors = link.encode(tensors, start, draws.link(k), link.client_state(tensors), sent).tensors


def _flat(parts: Mapping[int, Params]) -> Params:
    return {f"{k}/{name}": value for k, found in parts.items() for name, value in found.items()}


def _of(flat: Params, number: int) -> Params:
    return under(f"{number}/", flat)


def _put(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    whole = table.clone()
    whole[rows.to(table.device)] = values
    return whole
