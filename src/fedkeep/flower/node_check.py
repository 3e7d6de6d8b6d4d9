"""What a device needs before it takes part, looked at one after the other: ``fedkeep device check``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from fedkeep.core.errors import ConfigError, FedkeepError, Inspection, raising
from fedkeep.core.files import beside
from fedkeep.core.net import Net
from fedkeep.data.preparation import Encoding, Summary, agreeing
from fedkeep.experiments.config import Config, parse_config, parse_toml, read_text
from fedkeep.experiments.toml import to_toml
from fedkeep.flower.served import NO_DATA, limits_of, sent_of
from fedkeep.flower.supernode import SuperNode
from fedkeep.remote.node import Node
from fedkeep.remote.node_config import build_node, experiment, states_folder

EXPERIMENT = "experiment.toml"
"""Beside a device's configuration: the experiment that it is to take part in, for its owner to read and to check."""


def findings(config: Path, experiment: Path | None = None) -> Iterator[Inspection]:
    """Yield what is found of a device, each fault by itself.

    Args:
        config: the device's configuration.
        experiment: the experiment's; None: ``experiment.toml`` beside the device's, if it is there.
    """
    made: list[Node] = []

    def data() -> str:
        made.append(node := build_node(config))
        clients = node.clients
        return f"{len(clients)} client{'s' * (len(clients) != 1)}, e.g. {clients[0]}"

    yield _finding("data", data)
    yield _finding("private states", lambda: _states(config))
    path = config.parent / EXPERIMENT if experiment is None else experiment
    if path.is_file() or experiment is not None:
        found: list[Config] = []

        def terms() -> str:
            content = {**parse_toml(read_text(path), str(path)), "data": NO_DATA}
            found.append(parse_config(to_toml(content), str(path)))
            limits = asdict(limits_of(found[0].run))
            most = ", ".join(
                f"{'any number of' if most is None else most} {kind}" for kind, most in limits.items()
            )
            return f"{path.name} asks of a client at most {most}"

        yield _finding("terms", terms)
        if made and found:
            yield _finding("model", lambda: _model(made[0], found[0]))
    try:
        supernode = SuperNode.read(config, states_folder(config) / "flower")
    except FedkeepError as error:
        yield Inspection("link", str(error), good=False)
        return
    for what, look in supernode.looks():
        yield _finding(what, look)


def _finding(what: str, look: Callable[[], str]) -> Inspection:
    try:
        return Inspection(what, look())
    except (FedkeepError, OSError) as error:
        return Inspection(what, str(error), good=False)


def _states(config: Path) -> str:
    """Look whether private states can be written."""
    folder = states_folder(config)
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    part = beside(place / "check")
    with raising(
        ConfigError,
        "{place} cannot be written: {why}. Name another in device.folder, or change its rights.",
        OSError,
        place=place,
    ):
        part.touch(0o600)
        part.unlink()
    if place == folder and os.name == "posix" and folder.stat().st_mode & 0o077:
        return f"{folder} can be written; others may enter it until the first round"
    return f"{folder} can be written"


def _model(node: Node, config: Config) -> str:
    """Build what a server would let this device build, on an encoding of its own data alone."""
    from fedkeep.data.preparation import Rules

    rules = Rules(**asdict(config.preparation))
    told = json.loads(node.source.summary(rules).to_json())
    agreed, _ = agreeing({"here": Summary.from_json(json.dumps(told))})
    encoding = json.loads(Encoding.of(agreed).to_json())
    with raising(
        ConfigError, "{why} Ask the project's owner, or install what the model needs.", FedkeepError
    ):
        module, method = experiment(sent_of(config), encoding)
        method = method.resolved(module)
        module = method.made_for(module)
        halves = method.split.halves(module)
    initial = Net(module).initial()
    kept = sum(value.numel() for value in halves.private(initial).values())
    sent = sum(value.numel() for value in halves.federated(initial).values())
    return f"{method.name}: {sent:,} numbers are trained together, {kept:,} stay here"
