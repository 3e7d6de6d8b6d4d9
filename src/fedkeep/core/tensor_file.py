"""Tensors that wait in a temporary file, where they take no memory."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import RunError
from fedkeep.core.files import ROUND_KEPT
from fedkeep.kernels.values import pieces


class TensorFile:
    """A temporary file for tensors. It has no name, and is gone with its process.

    It lies where the system keeps temporary files (``TMPDIR``). Tensors pass by reads and writes, not by a map of the
    file into memory, whose pages would count as the process's.

    Raises:
        RunError: here and below: the disk is full, or the file can't be made, written or read.
    """

    def __init__(self) -> None:
        with _or_error("made"):
            made = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as its tensors
        self._file, self._end = made, 0
        weakref.finalize(self, made.close)

    def room(self, like: Tensor, kind: torch.dtype) -> Filed:
        """Return where a tensor of a shape and type will lie, behind the others; nothing is written."""
        start, form = self._end, torch.empty(like.shape, dtype=kind, device="meta")
        self._end += form.nbytes
        return Filed(self, start, form)

    def put(self, value: Tensor) -> Filed:
        """Write a tensor behind the others, and return where it lies."""
        found = self.room(value, value.dtype)
        self.write(found.start, value.contiguous())
        return found

    def write(self, start: int, value: Tensor) -> None:
        """Write a contiguous tensor's numbers at a place."""
        left = _bytes(value)
        with _or_error("written"):
            self._file.seek(start)
            while left:
                left = left[self._file.write(left) :]

    def read(self, start: int, into: Tensor) -> None:
        """Read a contiguous tensor's numbers from a place."""
        left = _bytes(into)
        with _or_error("read"):
            self._file.seek(start)
            while left:
                if not (count := self._file.readinto(left)):
                    raise OSError(None, "it was cut short")
                left = left[count:]


@dataclass(frozen=True)
class Filed:
    """A tensor in a file.

    Attributes:
        file, start: where it lies.
        form: its shape and type.
    """

    file: TensorFile
    start: int
    form: Tensor

    def load(self) -> Tensor:
        """Return the tensor."""
        value = torch.empty(self.form.shape, dtype=self.form.dtype)
        self.file.read(self.start, value)
        return value

    def pieces(self) -> Iterator[Tensor]:
        """Yield its numbers in the order of ``kernels.values.pieces``, each piece (numbers,)."""
        start = self.start
        for (form,) in pieces(self.form):
            piece = torch.empty(form.numel(), dtype=form.dtype)
            self.file.read(start, piece)
            yield piece
            start += piece.nbytes

    def fill(self, made: Iterable[Tensor]) -> None:
        """Write all numbers, given by pieces in the order of ``pieces``, each (numbers,)."""
        start = self.start
        for piece in made:
            self.file.write(start, piece)
            start += piece.nbytes

    def add_(self, other: Iterable[Tensor]) -> None:
        """Add a tensor of the same shape and type, given by its pieces, in place."""
        self.fill(piece.add_(more) for piece, more in zip(self.pieces(), other, strict=True))


def _bytes(value: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return value.detach().view(-1).view(torch.uint8).numpy().data


@contextmanager
def _or_error(done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            "A temporary file for tensors can't be {done}: {error}. It lies where TMPDIR says, or else where the system "
            "keeps such files. {kept}",
            done=done,
            error=error.strerror or error,
            kept=ROUND_KEPT,
        ) from error
