"""Sparse tensors hold their places and values in storages of their own, which are labelled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Phase, methods, sgd
from fedkeep.prove import Proof, prove
from fedkeep.prove.traced_labels import Tracer

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
PLACES = torch.tensor([[0, 1, 2], [2, 0, 1]])
SQUARE = (3, 3)


def coo(v: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(PLACES, v, SQUARE, check_invariants=False)


def csr(v: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(torch.arange(4), torch.tensor([2, 0, 1]), v, SQUARE)


def added(v: Tensor) -> Tensor:
    found = coo(torch.ones(3))
    return found.add_(coo(v)).to_dense()


def gradient(v: Tensor) -> Tensor:
    w = torch.ones(3, 2, requires_grad=True)
    return torch.autograd.grad(torch.sparse.mm(coo(v), w).sum(), [w])[0]


CARRIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda v: coo(v).to_dense(),
    "values": lambda v: coo(v)._values() * 1.0,
    "product": lambda v: torch.sparse.mm(coo(v), torch.ones(3, 2)),
    "sum": lambda v: torch.sparse.sum(coo(v)),
    "places": lambda v: torch.sparse_coo_tensor(v.long()[None], torch.ones(3), (9,)).to_dense(),
    "transposed": lambda v: coo(v).t().to_dense(),
    "added": added,
    "scaled": lambda v: (coo(torch.ones(3)) * v.sum()).to_dense(),
    "gradient": gradient,
    "rows": lambda v: csr(v) @ torch.ones(3, 2),
    "rows to dense": lambda v: csr(v).to_dense(),
    "columns": lambda v: csr(v).t().to_dense(),
    "found": lambda v: torch.diag(v).to_sparse().to_dense(),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_what_is_computed_of_a_sparse_tensor_has_its_labels(name: str) -> None:
    tracer, secret = Tracer(nn.Identity()), torch.tensor([2.0, 1.0, 3.0])
    tracer.begin(secret, "secret")
    with tracer:
        found = CARRIERS[name](secret)
    node = tracer.node(found)
    assert node.labels & tracer.bit("secret")


def test_a_sparse_tensor_has_the_labels_of_its_places_and_values_and_gives_each_its_own() -> None:
    tracer, places, values = Tracer(nn.Identity()), torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
    tracer.begin(places, "places")
    tracer.begin(values, "values")
    with tracer:
        whole = torch.sparse_coo_tensor(places, values, (3,))
        own = whole._values() * 1.0
    node = tracer.node(whole)
    assert node.labels == tracer.bit("places") | tracer.bit("values")
    node = tracer.node(own)
    assert node.labels & tracer.bit("values")


NUMBERS: dict[str, Callable[[Tensor], object]] = {
    "_to_sparse": lambda v: v.to_sparse(),
    "_to_sparse_csr": lambda v: torch.diag(v).to_sparse_csr(),
    "_nnz": lambda v: coo(v)._nnz(),
    "_coalesce": lambda v: torch.sparse_coo_tensor(v.long()[None], torch.ones(3), (9,)).coalesce(),
    "_sparse_sparse_matmul": lambda v: torch.sparse.mm(coo(v), coo(v)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_how_many_entries_there_are_is_a_number_that_leaves(name: str) -> None:
    tracer, secret = Tracer(nn.Identity()), torch.tensor([2.0, 1.0, 3.0])
    tracer.begin(secret, "secret")
    with tracer:
        NUMBERS[name](secret)
    assert name in {crossing.what for crossing in tracer.crossings.values()}


def test_entries_at_given_places_tell_nothing() -> None:
    tracer, secret = Tracer(nn.Identity()), torch.tensor([2.0, 1.0, 3.0])
    tracer.begin(secret, "secret")
    with tracer:
        torch.sparse.mm(coo(secret), torch.ones(3, 2))
        csr(secret).t().clone().detach()
    assert not tracer.crossings


class Neighbours(nn.Module):
    """Each example's logits with those of the next one, by a sparse matrix of given places."""

    def __init__(self, found: bool) -> None:
        super().__init__()
        self.linear, self.user, self.found = nn.Linear(3, 3), nn.Parameter(torch.zeros(3)), found

    def forward(self, x: Tensor) -> Tensor:
        row = torch.arange(len(x))
        shape = (len(x), len(x))
        matrix = torch.sparse_coo_tensor(torch.stack([row, row.roll(1)]), torch.ones(len(x)), shape)
        if self.found:
            matrix = self.user.detach().to_sparse()
            return self.linear(x) + self.user + len(matrix._values())
        return torch.sparse.mm(matrix, self.linear(x)) + self.user


def proof_of(found: bool) -> Proof:
    draw = np.random.default_rng(0)
    data = fedkeep.FederatedData.from_columns(
        client=np.repeat(["a", "b", "c"], 6),
        columns={"x": draw.standard_normal((18, 3)).astype(np.float32), "label": np.arange(18) % 3},
        split=(["train"] * 4 + ["valid", "test"]) * 3,
        meta={"task": "multiclass", "classes": 3},
    )
    return prove(Neighbours(found), methods.furl("user", local=Phase(optimizer=sgd(0.1))), data)


def test_a_model_with_a_sparse_matrix_is_proved() -> None:
    proof = proof_of(False)
    assert proof.ok
    assert proof.verdict("upload/linear.weight") == "declared"


def test_how_many_private_values_are_not_zero_is_unknown_to_a_proof() -> None:
    proof = proof_of(True)
    assert not proof.ok
    assert proof.verdict("upload/linear.weight") in ("path named", "unknown")
