"""Proofs: by which ways what must stay on a device reaches what leaves it; labels travel with tensors."""

from fedkeep.prove.proof_findings import Claim, Item, Proof
from fedkeep.prove.proving import prove

__all__ = ["Claim", "Item", "Proof", "prove"]
