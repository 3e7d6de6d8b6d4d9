"""A run that is to have another number of rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError
from fedkeep.core.run_files import Commit


def of_length(
    folder: Path,
    info: Mapping[str, Any],
    identity: Mapping[str, Any],
    length: Mapping[str, Any],
    last: Commit,
) -> dict[str, Any]:
    """Return what ``run.json`` is to say once the run has another number of rounds.

    Args:
        folder: the run's folder.
        info: what ``run.json`` says now.
        identity: what is to be run.
        length: entries that replace those there.
        last: the last finished round.

    Raises:
        RunError: what the run did depends on its length.
    """
    before, rounds = info["identity"]["rounds"], identity["rounds"]
    if rounds < last.round:
        raise RunError(
            f"{folder} has finished {last.round} rounds already, so it cannot end after {rounds}. Name at least "
            f"{last.round}, or another folder."
        )
    every = identity["evaluate_every"]
    waits = rounds == last.extra.get("pending")  # to be judged with the next round's training
    ends = last.round and last.round in (before, rounds)
    if every and ends and (waits or last.round % every):
        raise RunError(
            f"{folder} is a run of {before} rounds and has finished {last.round}, so it cannot end after {rounds}: "
            f"with evaluate_every = {every}, a run of {rounds} judges round {last.round} otherwise. Name another "
            f"folder."
        )
    places = list(_scheduled(identity))
    if places:
        raise RunError(
            f"{folder} is a run of {before} rounds and cannot be continued to {rounds}: the learning rate of "
            f"{' and '.join(places)} follows the run's length, so its rounds so far would have been others. Only a "
            f"constant schedule can be continued; name another folder."
        )
    old = ("analyses", "error")  # of a run that ended elsewhere
    kept = {key: value for key, value in info.items() if key not in old}
    now = {"identity": {**info["identity"], "rounds": rounds}, "rounds": rounds, "status": "running"}
    return {**kept, **length, **now}


def _scheduled(value: Any, path: str = "") -> Iterator[str]:
    """Yield the places of a description where a schedule is not constant."""
    if isinstance(value, Mapping):
        if value.get("schedule", "constant") != "constant":
            yield f"{path} ({value['schedule']})"
        for key, inner in value.items():
            yield from _scheduled(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _scheduled(inner, f"{path}[{number}]")
