"""Files that are either whole or absent: written beside their place, flushed to the disk, then renamed; and their locks.

What is being written has a name that nobody can foresee and that ends in ``.part``. It is a new file: a file or a link
that is there already is neither written through nor removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.params import Params, difference_of_names, nonfinite
from fedkeep.core.sealed import damaged, unread

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
for _flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):  # Windows has the last alone
    NEW_FILE |= getattr(os, _flag, 0)
LEFTOVER = re.compile(r".+\.[0-9a-f]{16}\.part")
AS_IT_WAS = "What was there is as it was. Free some space or check the rights, then try again."
ROUND_KEPT = (
    "Nothing was lost: the last finished round is kept. Free some space or check the rights, then resume."
)
PRIVATE_FILE, PRIVATE_FOLDER, PRIVATE_MASK = 0o600, 0o700, 0o077
"""Rights of what holds private values: its owner's alone. The mask gives them to all that a process makes."""
BEGIN = 40  # characters of a file's name that the name of what is to take its place begins with


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path as the user means it: ``~`` at its beginning is their home directory.

    Raises:
        ConfigError: nobody's home directory is known, as in a container without HOME.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            "The home directory of {path!r} is not known here. Set HOME, or write the path out.",
            path=str(path),
        ) from error


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that a crash at any instant leaves the old file or the new one; ``mode`` as for ``os.open``.

    Raises:
        RunError: the disk is full or the folder can't be written; the old file is as it was.
    """
    with _or_error(path, AS_IT_WAS):
        _replace(path, content, mode)


def write_of_run(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file of a run's folder, as ``write_whole``; an error says that the last finished round is kept."""
    with whole_or_error(path):
        _replace(path, content, mode)


def append_of_run(path: Path, content: bytes, size: int) -> None:
    """Add to a file of a run's folder that has ``size`` bytes, flushed to the disk.

    Raises:
        RunError: it has more or fewer, the disk is full or the file can't be written.
    """
    with whole_or_error(path), open(path, "ab") as file:
        if file.tell() != size:
            raise RunError(
                "{path} was changed while the run went on: wanted {wanted} bytes, found {found}. Restore the run from "
                "a copy, then resume.",
                path=path,
                wanted=size,
                found=file.tell(),
            )
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, content: bytes, mode: int) -> None:
    part = beside(path)
    handle = os.open(part, NEW_FILE, mode)
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # Ctrl-C too
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def is_free(folder: Path, *names: str) -> bool:
    """Whether a folder holds nothing but what a killed process left of files, and files of these names."""
    return all(path.name in names or LEFTOVER.fullmatch(path.name) for path in folder.iterdir())


def leftovers(folder: Path, begin: str = "") -> list[Path]:
    """Return what is being written in a folder in the place of files whose names begin so, or was left of it by a kill.

    Regular files called ``NAME.<16 random digits>.part``; of names that begin alike to ``BEGIN`` characters, all.
    """
    return [
        path
        for path in sorted(folder.glob("*.part"))
        if LEFTOVER.fullmatch(path.name) and path.name.startswith(begin[:BEGIN])
        if path.is_file() and not path.is_symlink()
    ]


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left of the files that it was writing in a folder.

    Only for a folder that is ours and locked. What can't be removed stays; nothing reads it.
    """
    for path in leftovers(folder):
        with suppress(OSError):
            path.unlink()


def wipe_leftovers(folder: Path, begin: str) -> None:
    """Remove what a killed process left of files whose names begin so, and its bytes.

    Each gets another name first, so that a process that is still writing it can't put zeros in the file's place.
    """
    for path in leftovers(folder, begin):
        unseen = beside(path)
        with suppress(FileNotFoundError):  # it has just been finished
            os.rename(path, unseen)
            wipe(unseen)


def wipe(path: Path) -> None:
    """Remove a file and its bytes, as far as the disk overwrites in place."""
    overwrite(path)
    path.unlink()


def overwrite(path: Path) -> None:
    """Replace a file's bytes by zeros."""
    with open(path, "r+b") as file:
        size = path.stat().st_size
        file.writelines(bytes(min(1 << 20, size - start)) for start in range(0, size, 1 << 20))
        file.flush()
        os.fsync(file.fileno())


def beside(path: Path) -> Path:
    """Return a path in the same folder for what is to take the place of ``path``: ``NAME.<16 random digits>.part``."""
    return path.with_name(f"{path.name[:BEGIN]}.{secrets.token_hex(8)}.part")


def whole_or_error(path: Path) -> AbstractContextManager[None]:
    """Say of an error of the system, while something is added to a run, that nothing was lost."""
    return _or_error(path, ROUND_KEPT)


@contextmanager
def _or_error(path: Path, what_now: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            "Cannot write {file}: {error}. {what_now}",
            file=path,
            error=error.strerror or error,
            what_now=what_now,
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def private_folder(folder: Path) -> None:
    """Make a folder if it is not there; only its owner may enter it, whoever made it."""
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    os.chmod(folder, PRIVATE_FOLDER)


def keep_private(folder: Path) -> None:
    """Let only its owner enter a folder and what is in it."""
    os.chmod(folder, PRIVATE_FOLDER)
    for path in folder.rglob("*"):
        os.chmod(path, PRIVATE_FOLDER if path.is_dir() else PRIVATE_FILE)


def sync_tree(folder: Path) -> None:
    """Flush a folder, and all files and folders in it, to the disk: each once, before it gets its name."""
    for place, _, names in os.walk(folder):
        for name in names:
            with open(Path(place, name), "r+b") as file:  # Windows flushes none that is open to read
                os.fsync(file.fileno())
        sync_folder(Path(place))


def state_name(client: str) -> str:
    """Return the name of a client's file: a hash, so that no id can name a place elsewhere or clash with another."""
    return f"{hashlib.sha256(client.encode('utf-8')).hexdigest()[:32]}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file, whole or not at all."""
    write_whole(path, tensor_file(tensors)[0])


def tensor_file(tensors: Mapping[str, Tensor]) -> tuple[bytes, str]:
    """Return the content of a safetensors file, and its hash, by which ``load_verified`` reads it."""
    content = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return content, hashlib.sha256(content).hexdigest()


def read_tensors(path: Path) -> Params:
    """Return the tensors of a safetensors file.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        return load(path.read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(
            "Cannot read {file}: {error}. The file is missing or damaged; restore it from a copy.",
            file=path,
            error=error,
        ) from error


def layout(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of tensors by name, e.g. ``float32 3x4``."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')} {'x'.join(map(str, t.shape)) or 'scalar'}"
        for name, t in sorted(tensors.items())
    }


def check_tensors(
    path: Path, wanted: Mapping[str, str], found: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Check what was read against the layout that it must have, and that it is finite.

    Raises:
        RunError: a name, shape or dtype differs, or a value is NaN or infinite.
    """
    fault = difference_of_names(wanted, found)
    fault = fault or next(
        (f"{n!r} should be {w}, is {found[n]}" for n, w in wanted.items() if found[n] != w), ""
    )
    if not fault and (name := nonfinite(tensors)) is not None:
        fault = f"{name!r} holds a NaN or an infinity"
    if fault:
        raise RunError(
            "{file} does not hold what the run needs: {fault}. Restore the run from a copy.",
            file=path,
            fault=fault,
        )


def load_verified(path: Path, sha256: str) -> Params:
    """Return a safetensors file's tensors after checking its hash.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unread(path, error) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(
            "{file} is damaged: its hash is not the committed one. Restore the run from a copy.", file=path
        )
    try:
        return load(content)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise damaged(path, error) from error
