"""What a run publishes, as one file that its devices trust: signed by the key that the signed project names.

The file is safetensors. Its header holds what the values are, the project that was signed with the owner's key, and a
signature of all by ``publisher.key``, whose public part stands in that project. So a device needs nothing but the
public keys that it trusts, and no link.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedkeep.core.describe import digest
from fedkeep.core.errors import ConfigError, RunError, raising
from fedkeep.core.files import PRIVATE_FILE, private_folder, write_whole
from fedkeep.core.params import Params, nonfinite
from fedkeep.core.sealed import check_format
from fedkeep.flower.served import experiments_in
from fedkeep.flower.signed import PUBLISHER, Signed, is_signed, private_key
from fedkeep.flower.supernode import trusted_by
from fedkeep.methods import Sent
from fedkeep.remote.device_file import RUN_ID
from fedkeep.remote.node_config import states_folder
from fedkeep.remote.published import Models, Published, published_of

FORMAT = 3
ENDING = ".published"


def publish(
    run: Path, out: Path, *, project: Path, key: Path, clients: Sequence[str] = (), last: bool = False
) -> Published:
    """Write what a run publishes: of its best round on ``valid``, or the last.

    Args:
        run: the server's folder of the run.
        out: a file, which is replaced.
        project: the signed project of the run.
        key: ``publisher.key``; its public part is the one that the project names.
        clients: for whom, where the method sends each client something else.
        last: of the last finished round in any case.

    Raises:
        RunError, ConfigError: as for ``published_of``; or the project is not signed, is another run's, or names
            another key.
    """
    published, signed, signer = published_of(run, clients, last=last), Signed.of(project), private_key(key)
    _check_covers({name: text.encode() for name, text in signed.contents.items()}, published, str(project))
    if _publisher(signed.contents, str(project)) != signer.public_key():
        raise ConfigError(
            "{project} names another key than {key} in {publisher}. Sign it again where publisher.pub is.",
            project=project,
            key=key,
            publisher=PUBLISHER,
        )
    tensors, about = _plain(published)
    header = json.dumps({"format": FORMAT, **about, "project": asdict(signed)})
    signature = base64.b64encode(signer.sign(_statement(header, tensors))).decode()
    write_whole(out, save(tensors, metadata={"published": header, "signature": signature}))
    return published


def _plain(published: Published) -> tuple[Params, dict[str, Any]]:
    """Return values by ``NUMBER/NAME``, and the rest; the order of names goes with it, as sums over names follow it."""
    flat = {client: sent.flat for client, sent in published.sent.items()}
    tensors = {
        f"{number}/{name}": value.detach().cpu().contiguous().clone()
        for number, values in enumerate(flat.values())
        for name, value in values.items()
    }
    about = {name: value for name, value in vars(published).items() if name != "sent"}
    return tensors, about | {"sent": {client: list(values) for client, values in flat.items()}}


def _statement(header: str, tensors: Params) -> bytes:
    return f"fedkeep published\n{digest(tensors)}\n{header}".encode()


def read_published(path: Path, trusted: Iterable[Path]) -> Published:
    """Return what a file publishes.

    Args:
        path: the file.
        trusted: the public keys whose projects this device answers.

    Raises:
        RunError: it cannot be read, it was changed, nobody whom the device trusts has signed its project, or the key
            that this names has not signed the file.
        ConfigError: there is no such file, or one of the keys is none.
    """
    with (
        raising(
            RunError,
            "{path} is nothing that a run published, or is damaged: {why}.",
            OSError,
            SafetensorError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            path=path,
        ),
        raising(
            ConfigError,
            "There is no file {path}. It is what fedkeep flower publish has written.",
            FileNotFoundError,
            IsADirectoryError,
            path=path,
        ),
    ):
        with safe_open(str(path), framework="pt") as file:
            found = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        header = json.loads(found["published"])
        check_format(path, header.get("format"), FORMAT, anew="publish it again")
        signature = base64.b64decode(found["signature"], validate=True)
        signed = Signed(**header["project"])
        contents = signed.check(trusted)
        if not is_signed(
            _publisher(signed.contents, str(path)), _statement(found["published"], tensors), signature
        ):
            raise RunError(
                "{path} is not what the run's server published: the key that the signed project names has not signed "
                "it, or it was changed since. Get it again.",
                path=path,
            )
        if nonfinite(tensors) is not None:
            raise RunError(
                "{path} holds a NaN or an infinity. Ask the server's owner for another round's.", path=path
            )
        sent = {
            client: Sent.of({name: tensors[f"{number}/{name}"] for name in names})
            for number, (client, names) in enumerate(header["sent"].items())
        }
        names = ("run", "round", "finished", "experiment", "encoding", "seed", "fingerprint", "rolled_back")
        published = Published(**{name: header[name] for name in names}, sent=sent)
        if not RUN_ID.fullmatch(published.run):
            raise ValueError("its run has no name")
    _check_covers(contents, published, str(path))
    return published


def _check_covers(contents: Mapping[str, bytes], published: Published, where: str) -> None:
    if published.experiment not in experiments_in(contents):
        raise RunError(
            "{where}: the run's experiment is not in the signed project. Name the project it was started from.",
            where=where,
        )


def _publisher(contents: Mapping[str, str], where: str) -> Ed25519PublicKey:
    """Return the key that a project names."""
    with raising(
        RunError,
        "{where}: the signed project names no key that publishes ({PUBLISHER}). Make keys with fedkeep "
        "flower init, and sign the project beside publisher.pub.",
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        UnsupportedAlgorithm,
        where=where,
        PUBLISHER=PUBLISHER,
    ):
        key = load_ssh_public_key(json.loads(contents[PUBLISHER])["ed25519"].encode())
    if not isinstance(key, Ed25519PublicKey):
        raise RunError("{where}: the key in {publisher} is no Ed25519 key.", where=where, publisher=PUBLISHER)
    return key


def models_of(config: Path, file: Path | None, run: str | None = None) -> Models:
    """Return the models of a device's clients, of what was published last; a file that is given is kept for later.

    Args:
        config: the device's configuration.
        file: what was published; None: what was given last.
        run: which run's, where no file is given; None: the only one's of which one was given before.

    Raises:
        FedkeepError: as for ``read_published`` and ``Models``; or nothing was given yet, or a newer one was.
    """
    trusted, folder = trusted_by(config), states_folder(config)
    if file is None:
        there = sorted(folder.glob(f"{run or '*'}{ENDING}"))
        if not there:
            of = f" of the run {run}" if run else ""
            raise ConfigError(
                "{folder} has nothing yet that a server{of} published. Ask its owner for the file that fedkeep flower "
                "publish writes, and name it once: --published FILE.",
                folder=folder,
                of=of,
            )
        if len(there) > 1:
            dated = [
                f"{one.stem} (given {datetime.fromtimestamp(one.stat().st_mtime):%Y-%m-%d %H:%M})"
                for one in there
            ]
            raise ConfigError(
                "{folder} has what was published of {count} runs: {dated}. Name one with --run.",
                folder=folder,
                count=len(there),
                dated=", ".join(dated),
            )
        return Models(config, read_published(there[0], trusted))
    published = read_published(file, trusted)
    if run not in (None, published.run):
        raise ConfigError(
            "{file} is of the run {got}, and not of {run}.", file=file, got=published.run, run=run
        )
    kept = folder / f"{published.run}{ENDING}"
    if kept.exists() and (before := read_published(kept, trusted)).age > published.age:
        raise RunError(
            "{file} was published after round {finished}, and this device has had what was published after "
            "round {before}: it is older. Leave out --published for that one.",
            file=file,
            finished=published.finished,
            before=before.finished,
        )
    models = Models(config, published)
    private_folder(folder)
    write_whole(kept, file.read_bytes(), PRIVATE_FILE)
    return models
