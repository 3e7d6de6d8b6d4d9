"""Which examples did a change come from: words of a text, an image."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from fedkeep.attacks.sightings import Sighting
from fedkeep.core.net import Net
from fedkeep.core.optim import adam
from fedkeep.core.params import Batch, Params


def rows_seen(sighting: Sighting, table: str) -> set[int]:
    """Return the rows of an embedding that changed: the words that a client's texts hold, exactly.

    The server knows the vocabulary and sees the change. A word that no text holds has no gradient. Under noise the
    attacker takes rows that are longer than noise alone would make them: ‖row‖² > σ² (d + 4 √(2 d)).
    Guessing: the words that most clients use.
    """
    if table in sighting.rows:
        return set(sighting.rows[table].tolist())
    squares, width = sighting.changes[table].double().square().sum(1), sighting.changes[table].shape[1]
    least = sighting.noise**2 * (width + 4 * (2 * width) ** 0.5)
    return set((squares > least).nonzero().squeeze(1).tolist())


def words_f1(found: Collection[int], true: Collection[int]) -> float:
    """Return 2 |found ∩ true| / (|found| + |true|); padding, the word 0, counts in neither."""
    found, true = set(found) - {0}, set(true) - {0}
    return 2 * len(found & true) / max(len(found) + len(true), 1)


def layer_input(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the input of a linear layer from its change, (inputs,): Σ_o Δb_o ΔW_o / Σ_o Δb_o².

    Of one example ΔW_o = Δb_o x for every unit o, so this is x itself; of several it is a weighted mean (Phong et al.,
    2018, §3.1).
    """
    weight, bias = weight.double(), bias.double()
    return (bias @ weight) / bias.square().sum().clamp(min=1e-300)


def psnr(found: Tensor, true: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of images with pixels from 0 to 1; 60 at most."""
    error = (found.double().clamp(0, 1) - true.double()).square().mean()
    return float(min(-10 * torch.log10(error.clamp(min=1e-6)), torch.tensor(60.0)))


def invert_image(
    net: Net,
    params: Params,
    sighting: Sighting,
    start: Tensor,
    label: int,
    loss: Callable[[Net, Params, Batch], Tensor],
    *,
    steps: int = 120,
    column: str = "image",
) -> Tensor:
    """Return an image whose gradient looks like what was seen, (C, H, W) from 0 to 1.

    The server knows the model, the label and a mean image, and sees the change after one step of SGD on one image. It
    minimises 1 − cos(∇, −Δ) plus a fifth of the total variation (Geiping et al., Inverting Gradients, 2020, eq. 4).
    Where the first linear layer's change is there, the layer's input follows exactly (``layer_input``), and the image's
    features are drawn to it. Dropout is off: the attacker does not know what was dropped. Guessing: the mean image.

    Args:
        net: the model.
        params: all that the attacker knows of it; private parts have their default values.
        sighting: what was seen.
        start: (C, H, W) from 0 to 1, where the search begins.
        label: the image's.
        loss: of a batch, differentiable twice.
        steps: of Adam.
        column: the model's argument.
    """
    names = [n for n in sighting.changes if n in net.trainable() and bool(sighting.changes[n].any())]
    seen = [-sighting.changes[n] for n in names]
    net.train(False)
    known = {n: v.detach().clone().requires_grad_(n in names) for n, v in params.items()}
    layer = first_layer(net.module, names)
    wanted = (
        None
        if layer is None
        else layer_input(*(sighting.changes[f"{layer}.{p}"] for p in ("weight", "bias")))
    )
    kept: list[Tensor] = []
    hook = None
    if layer is not None:
        hook = net.module.get_submodule(layer).register_forward_pre_hook(
            lambda _, given: kept.append(given[0])
        )
    image = start.detach().clone().unsqueeze(0).requires_grad_()
    optimizer = adam(0.05, bounds={column: (0.0, 1.0)})
    state = optimizer.init()
    for _ in range(steps):
        kept.clear()
        value = loss(net, known, {column: image, "label": torch.tensor([label])})
        grads = torch.autograd.grad(value, [known[n] for n in names], create_graph=True)
        up = sum((g * s).sum() for g, s in zip(grads, seen, strict=True))
        sizes = [sum(v.square().sum() for v in some) for some in (grads, seen)]
        distance = 1 - up / (sizes[0] * sizes[1]).clamp(min=1e-30).sqrt()  # type: ignore[union-attr]
        if wanted is not None and kept:
            target = wanted.to(kept[0].dtype)
            distance = distance + (kept[0][0] - target).square().sum() / target.square().sum().clamp(
                min=1e-12
            )
        smooth = image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean()
        (slope,) = torch.autograd.grad(distance + 0.2 * smooth, [image])
        optimizer.update({column: image}, {column: slope}, state)
    if hook is not None:
        hook.remove()
    return image.detach()[0]


def first_layer(module: nn.Module, names: Collection[str]) -> str | None:
    """Return the first linear layer with a bias, in the module's order, of which both tensors are known."""
    layers = (n for n, layer in module.named_modules() if isinstance(layer, nn.Linear))
    return next((n for n in layers if {f"{n}.weight", f"{n}.bias"} <= set(names)), None)
