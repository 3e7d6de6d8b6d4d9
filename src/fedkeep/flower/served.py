"""What a server's configuration runs across machines.

It is the usual TOML. It needs no ``[data]``, as a server has no data, and may have a table ``[rounds]``: the fields of
``RoundPolicy``, and ``clients``, how many must be there before the first round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.config import Config, parse_config, parse_overrides, parse_toml, read_text
from fedkeep.experiments.config_tables import made_of
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.toml import to_toml
from fedkeep.methods import Method
from fedkeep.methods.hook_declarations import sent_to
from fedkeep.remote.device_tally import AGAIN, Limits, SignedWords
from fedkeep.remote.node_config import experiment
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.served_run import Federation

NO_DATA = {"reader": "devices"}
"""Stands for ``[data]``, which a server does not have."""
SENT = {"seed", "model", "method", "preparation", "privacy"}
"""What devices are told of a configuration."""
POLICY = [f.name for f in fields(RoundPolicy)]


@dataclass(frozen=True, kw_only=True)
class RoundsTable(RoundPolicy):
    """The table ``[rounds]``: the policy of rounds, and how many clients must be there before the first."""

    clients: Annotated[int, Field(ge=1)] = 1


def federation_of(text: str, where: str = "config.toml") -> Federation:
    """Return what a server's configuration says.

    Raises:
        ConfigError: it is wrong; every fault is named.
    """
    content = parse_toml(text, where)
    config = parse_config(to_toml({"data": NO_DATA, **content}), where)
    _check_run(config, where)
    run = config.run
    usual = {"minimum": run.min_clients} if "min_clients" in content.get("run", {}) else {}
    rounds: RoundsTable = made_of(RoundsTable, config.rounds or {}, where, "rounds", usual)
    policy = RoundPolicy(**{name: getattr(rounds, name) for name in POLICY})
    sent = sent_of(config)
    return Federation(
        name=config.name,
        text=sent,
        build=lambda encoding: experiment(sent, encoding),
        summarise=asdict(config.preparation),
        secure=_secure(config),
        clients=rounds.clients,
        seed=config.seed,
        privacy=config.privacy,
        policy=policy,
        config=config.model_dump(mode="json"),
        **{one.name: getattr(run, one.name) for one in fields(RunSettings)},
    )


def _secure(config: Config) -> float | None:
    """Return the threshold of secure sums, where the method has them."""
    return None if config.method.secure is None else config.method.secure.threshold


def sent_of(config: Config) -> str:
    """Return what devices are told of a configuration; with differential privacy also what ε goes by."""
    here = {
        "rounds": 0,
        **({} if config.run.accelerate else {"accelerate": False}),  # or devices' layers would be others
        **({} if config.privacy is None else {"cohort": config.run.cohort, "sampling": config.run.sampling}),
    }
    return to_toml({"data": NO_DATA, "run": here, **config.model_dump(exclude_unset=True, include=SENT)})


def at_the_end(method: Method) -> list[str]:
    """Return what a method needs once the rounds are over until devices can use their models, for people."""
    lines = []
    if method.adapt.everyone and method.adapt.phases:
        lines.append(
            "Its models are made after the rounds: then each device runs fedkeep device adapt, or the server orders it "
            "once (only = 'adapt')."
        )
    if sent_to(method.server.send) != "all":
        lines.append(
            "It sends each client something else: publish a file for each, by fedkeep flower publish --client."
        )
    return lines


def experiments_in(files: Mapping[str, bytes]) -> dict[str, SignedWords]:
    """Return the experiments of a project's files, for ``Node.signed``: every TOML that is a configuration is one."""
    found: dict[str, SignedWords] = {}
    for name, content in files.items():
        if name.endswith(".toml"):
            with suppress(ConfigError, UnicodeDecodeError):
                tables = {**parse_toml(content.decode(), name), "data": NO_DATA}
                if not tables.keys() <= Config.model_fields.keys():  # another TOML, as pyproject.toml is
                    continue  # to say all that is wrong with it took most of what a message takes
                config = parse_config(to_toml(tables), name)
                text, limits = sent_of(config), limits_of(config.run)
                if text in found:  # twice, with other rounds
                    limits = limits.with_others(found[text].limits, max)
                preparation = json.loads(json.dumps(asdict(config.preparation)))
                found[text] = SignedWords(preparation=preparation, secure=_secure(config), limits=limits)
    return found


def limits_of(run: RunSettings) -> Limits:
    """Return the most that the rounds of a configuration ask of a client; a round may come again.

    By epochs a client trains about once in each. How many rounds these are, and so how often is judged where
    ``evaluate_every`` says so in rounds, depends on who is there: then there is no limit to judging but the owner's.
    """
    passes = run.rounds if run.rounds is not None else math.ceil(run.passes or 0)
    trainings = passes + max(passes, AGAIN)
    if run.rounds is None and run.evaluate_every:
        return Limits(trainings=trainings)
    evaluations = (
        passes if run.evaluate_every is None else passes // run.evaluate_every if run.evaluate_every else 0
    )
    judgings = 3 * (evaluations + 1) + max(evaluations, AGAIN)
    adaptations = (evaluations + 1) * run.evaluate_adapted + AGAIN
    return Limits(trainings=trainings, judgings=judgings, adaptations=adaptations)


def without_data(path: Path, overrides: Sequence[str] = ()) -> str | None:
    """Return the text of a configuration that names no data, with overrides; None if it is no file, or names some.

    Raises:
        ConfigError: the file, or an override, is wrong.
    """
    if not path.is_file():
        return None
    content = parse_toml(text := read_text(path), str(path))
    changes = parse_overrides(list(overrides))
    if "data" in content or any(key.split(".")[0] == "data" for key in changes):
        return None
    if not changes:
        return text
    return parse_config(to_toml({"data": NO_DATA, **content}), str(path), changes).to_toml()


def _check_run(config: Config, where: str) -> None:
    if config.run.hold_out:
        raise ConfigError(
            "{where}: run.hold_out: a run across machines holds no client out. Leave it out.", where=where
        )
    if config.run.sampling == "poisson" and config.privacy is None:
        raise ConfigError(
            "{where}: run.sampling: 'poisson' across machines goes with a table [privacy] alone. Name another.",
            where=where,
        )
    if config.personalization is not None:
        raise ConfigError(
            "{where}: personalization: not across machines. Leave the table out; fedkeep personalize has it.",
            where=where,
        )
    if config.ranking is not None:
        raise ConfigError(
            "{where}: ranking: not across machines. Devices judge their own examples alone; leave the table out.",
            where=where,
        )
    if config.run.metrics:
        raise ConfigError(
            "{where}: run.metrics: not across machines. They are made of how often each class was a label and was "
            "predicted, which devices do not tell. Leave it out.",
            where=where,
        )
