"""The contract of an upload chain's links."""

from __future__ import annotations

from typing import Protocol

import torch

from fedkeep.core.params import Params


class Transform(Protocol):
    """A link of the upload chain, a frozen value: ``encode`` runs on the client, ``decode`` on the server.

    The links of ``Method.upload`` encode in order and decode in the opposite order, one client at a time, before
    averaging. Neither sees a private parameter.
    """

    def encode(self, tensors: Params, received: Params, draw: torch.Generator) -> Params:
        """Return what travels instead of ``tensors``.

        Args:
            tensors: changes by federated name, or what the link before made of them; tables are cut to the rows that
                the client uploads.
            received: the federated parameters as the server sent them, cut likewise.
            draw: the client's random stream for this link and round.
        """
        ...

    def decode(self, tensors: Params, received: Params) -> Params:
        """Return what ``encode`` was given, or the server's best account of it.

        Raises:
            UploadError: the tensors cannot be decoded, e.g. a name is missing or a shape is wrong.
        """
        ...
