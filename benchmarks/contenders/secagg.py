"""One client's work in Flower's SecAgg+."""

from __future__ import annotations

import os

import numpy as np
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_mod
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
from flwr.supercore.primitives.asymmetric import generate_key_pairs, private_key_to_bytes


class Flower:
    """A client of SecAgg+ among neighbours: the primitives of Flower's mod, in its order."""

    def __init__(self, clients: int, threshold: int) -> None:
        self.clients, self.threshold = clients, threshold
        self.own, self.others = generate_key_pairs(), [generate_key_pairs()[1] for _ in range(clients - 1)]
        self.secret = private_key_to_bytes(self.own[0])

    def shares(self) -> None:
        """Make shares of the seed and of the key, and encrypt a pair for each neighbour."""
        self.seed = os.urandom(32)
        pairs = zip(
            *(create_shares(s, self.threshold, self.clients) for s in (self.seed, self.secret)), strict=True
        )
        for place, (public, (one, two)) in enumerate(zip(self.others, pairs, strict=False)):
            encrypt(generate_shared_key(self.own[0], public), share_keys_plaintext_concat(0, place, one, two))

    def masked(self, values: np.ndarray) -> None:
        """Quantise a vector, and add its own mask and one with each neighbour, as Flower's defaults have it."""
        total = quantize([values], 8.0, 1 << 22)
        for key in (self.seed, *(generate_shared_key(self.own[0], public) for public in self.others)):
            total = parameters_addition(total, pseudo_rand_gen(key, 1 << 32, [values.shape]))
        parameters_mod(total, 1 << 32)
