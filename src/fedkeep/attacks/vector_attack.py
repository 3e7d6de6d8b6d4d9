"""A client's private vector, read by a server that knows the federated part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedkeep.attacks.inputs import layer_input
from fedkeep.attacks.sightings import Sighting
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params


def place_of(net: Net, params: Params, batch: Batch, vector: str) -> tuple[str, slice] | None:
    """Return the linear layer that a private vector goes into as it is, and which of its inputs it is; None: none.

    Found by a trial with random numbers in the vector's place; the attacker knows the model, so may try this too.
    """
    value = params[vector]
    probe = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)
    found: list[tuple[str, slice]] = []

    def look(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            rows = given[0].reshape(-1, given[0].shape[-1])
            starts = (rows[0] == probe[0]).nonzero().squeeze(1).tolist()
            places = [slice(start, start + len(probe)) for start in starts]
            found.extend((name, p) for p in places if torch.equal(rows[:, p], probe.expand(len(rows), -1)))

        return hook

    layers = [
        (n, layer)
        for n, layer in net.module.named_modules()
        if isinstance(layer, nn.Linear) and layer.bias is not None
    ]
    hooks = [layer.register_forward_pre_hook(look(n)) for n, layer in layers]
    net.train(False)
    with torch.no_grad():
        net({**params, vector: probe}, batch)
    for hook in hooks:
        hook.remove()
    return found[0] if found else None


def vector_in_upload(sighting: Sighting, layer: str, inputs: slice) -> Tensor:
    """Return the user vector from one upload, (dim,).

    The server sees the change of a linear layer over concat(text, user). Every example of the client has the same user
    vector u, so the gradient of the layer's weights at these inputs is that of its bias times u: ΔW[:, user] = Δb uᵀ,
    whatever the batch. After one step of SGD (any clipping, momentum or weight decay of none) that is exact; after
    several it is a mean of the vectors on the way. Adam's steps do not keep the proportion. Keeping u at home does not
    help. Guessing: another client's vector.
    """
    changes = sighting.changes
    return layer_input(changes[f"{layer}.weight"][:, inputs], changes[f"{layer}.bias"])


def vector_from_predictions(
    net: Net,
    params: Params,
    private: Params,
    batch: Batch,
    seen: Tensor,
    predict: Callable[[Net, Params, Batch], Tensor],
    steps: int = 100,
) -> Params:
    """Return private values under which the model predicts what was seen, found by L-BFGS from default values.

    The attacker knows the federated part, chooses inputs, and sees the probabilities that the client's own model gives;
    nothing is uploaded. Guessing: another client's vector, and the default's predictions.

    Args:
        net: the model.
        params: what the attacker knows.
        private: default private values, by name: where the search begins.
        batch: the inputs.
        seen: (..., classes) log-probabilities.
        predict: the method's.
        steps: at most.
    """
    draw = torch.Generator().manual_seed(0)
    free = {
        n: (v + 0.01 * torch.randn(v.shape, generator=draw).to(v.dtype)).requires_grad_()
        for n, v in private.items()
        if v.is_floating_point()
    }
    net.train(False)
    optimizer = torch.optim.LBFGS(
        list(free.values()), max_iter=steps, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> float:
        found = predict(net, {**params, **private, **free}, batch).log_softmax(-1)
        distance = nn.functional.kl_div(found, seen, log_target=True, reduction="batchmean")
        for value, slope in zip(
            free.values(), torch.autograd.grad(distance, list(free.values())), strict=True
        ):
            value.grad = slope
        return float(distance.detach())

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return {**private, **{n: v.detach() for n, v in free.items()}}
