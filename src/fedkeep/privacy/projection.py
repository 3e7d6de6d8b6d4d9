"""Projection-based dimension reduction of an embedding table before it is uploaded.

Source: KTEPS (arXiv 2107.11956), §4.2, eq. 10–12. The client takes the principal components v_1 .. v_d of its table
W (n, d), keeps V = [v_{d_s} .. v_{d_e}], and sends W' = W V and V; the server restores Ŵ = W' Vᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, UploadError, check_choice, did_you_mean
from fedkeep.core.params import Params
from fedkeep.privacy.draws import Draw
from fedkeep.privacy.link import Encoded, Link

PROJECTED, BASIS = "/projected", "/basis"
WORDS = "embedding.weight"
"""The table of words of fedkeep's own models; of others it is found where a method meets its model."""


@dataclass(frozen=True)
class Projection(Link):
    """Sends W V and V instead of a table's change, V the table's principal components ``start`` .. ``end``.

    On the wire a table ``name`` is ``name/projected``, shape (n, end − start + 1), and ``name/basis``, shape
    (d, end − start + 1). With start 1 and end d nothing is lost but rounding.

    Attributes:
        start: d_s, the first component kept; counted from 1, by falling variance.
        end: d_e, the last one kept.
        table: name pattern of the tables (n, d); it must match.
        target: ``"matrix"``: the trained table itself is projected, so that what one round takes away is gone from
            the next one's table, and a new first component is taken away then (the paper's way); ``"delta"``: its
            change is.
        center: components of the centred covariance; False: of WᵀW, which makes the energy kept Σσ² of the kept
            singular values over all. The table itself is projected uncentred either way.
    """

    start: int = 2
    end: int = 150
    table: str = WORDS
    target: Literal["matrix", "delta"] = "matrix"
    center: bool = True

    def __post_init__(self) -> None:
        if self.start < 1 or self.end < self.start:
            raise ConfigError(
                "A projection keeps the components start .. end, counted from 1, with start at most end; got "
                "start={start} and end={end}.",
                start=self.start,
                end=self.end,
            )
        check_choice("target must be", self.target, ("matrix", "delta"))

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return the tensors with every table's change replaced by projected values and the basis.

        Raises:
            ConfigError: the pattern matches nothing, or a table has fewer columns than ``end``.
        """
        names = [n for n in tensors if fnmatchcase(n, self.table)]
        if not names:
            raise ConfigError(
                "The projection's table {table!r} matches nothing that is uploaded.{near} Name the model's table of words "
                "in it, or train without one: kteps in place of kteps_star.",
                table=self.table,
                near=did_you_mean(self.table, list(tensors)),
            )
        out: Params = {}
        for name, change in tensors.items():
            if name not in names:
                out[name] = change
                continue
            matrix = start[name] + change if self.target == "matrix" else change
            basis = self.basis(matrix)
            out[name + PROJECTED], out[name + BASIS] = matrix @ basis, basis
        return Encoded(tensors=out)

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        """Return the tensors with every table's change restored.

        Raises:
            UploadError: half of a pair is missing, or shapes don't fit.
        """
        out: Params = {}
        for name, value in tensors.items():
            table = name.removesuffix(PROJECTED).removesuffix(BASIS)
            if table == name or table not in start:
                out[name] = value
            elif table not in out:
                out[table] = self._restored(table, tensors, start[table])
        return out

    def _restored(self, name: str, tensors: Params, start: Tensor) -> Tensor:
        projected, basis = self.pair(name, tensors, PROJECTED, BASIS)
        rows, width = start.shape
        kept = self.end - self.start + 1
        if tuple(projected.shape) != (rows, kept) or tuple(basis.shape) != (width, kept):
            raise UploadError(
                "{name!r} should come as ({rows}, {kept}) and ({width}, {kept}), came as {shape} and "
                "{shape_2}",
                name=name,
                rows=rows,
                kept=kept,
                width=width,
                shape=tuple(projected.shape),
                shape_2=tuple(basis.shape),
            )
        # Of one layout, whether it came over a wire or not: sums in another order round in another way.
        matrix = projected @ basis.mT.contiguous()
        return matrix - start if self.target == "matrix" else matrix

    def basis(self, matrix: Tensor) -> Tensor:
        """Return V, shape (d, end − start + 1), orthonormal columns; each one's largest entry is positive.

        Computed in double precision, so that it doesn't depend on the order of sums.

        Raises:
            ConfigError: the matrix isn't (n, d) with d at least ``end``.
        """
        if matrix.dim() != 2 or matrix.shape[1] < self.end:
            raise ConfigError(
                "A projection on the components {start} .. {end} wants a table of shape (n, d) with d at "
                "least {end}; got {got}. Lower end, or name another table.",
                start=self.start,
                end=self.end,
                got=tuple(matrix.shape),
            )
        exact = matrix.detach().double()
        if self.center:
            exact = exact - exact.mean(0)
        _, vectors = torch.linalg.eigh(exact.mT @ exact)  # ascending
        chosen = vectors.flip(1)[:, self.start - 1 : self.end]
        largest = chosen.gather(0, chosen.abs().argmax(0, keepdim=True))
        basis: Tensor = chosen * largest.sign()
        return basis.to(matrix.dtype)
