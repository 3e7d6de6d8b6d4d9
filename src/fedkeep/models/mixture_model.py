"""A mixture of two experts: one that is shared, one of the client's own, and a gate that weighs them.

Source: arXiv:2010.02056, eq. 5: ŷ = h(x) f_l(x) + (1 − h(x)) f_g(x), the share h between 0 and 1. The experts may
differ in architecture; the gate may be any network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Takes, logits_of

CONFIDENCES = 5


class MixtureOfExperts(nn.Module):
    """Log-probabilities of h(x) p_l + (1 − h(x)) p_g, the experts' class probabilities p weighed by the gate's share h.

    Every part is given the columns that its own ``forward`` (the gate: ``logit``) names. An expert or gate that is not
    trained at the moment predicts as it will after training, without dropout.

    Args:
        global_expert: gives logits, shape (B, classes); shared by all clients.
        local_expert: gives logits, shape (B, classes); each client's own.
        gate: its method ``logit`` gives log(h / (1 − h)), shape (B,), e.g. :class:`Gate`; arguments called
            ``local_logits`` and ``global_logits`` are the experts' outputs.

    Raises:
        MethodError: a gate without ``logit``; at the first use, experts or a gate whose outputs don't fit.
    """

    def __init__(self, global_expert: nn.Module, local_expert: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        if not callable(getattr(gate, "logit", None)):
            raise MethodError(
                "The gate of a mixture wants a method logit(<columns>) that returns log(h / (1 - h)), shape (B,); "
                "{gate} has none. Wrap a network with one output: models.Gate(network).",
                gate=type(gate).__name__,
            )
        self.global_expert, self.local_expert, self.gate = global_expert, local_expert, gate
        gating: Any = gate.network.forward if isinstance(gate, Gate) else gate.logit
        self._takes = {
            name: Takes(f"The mixture's {name}, {type(part).__name__},", function)
            for name, part, function in (
                ("global_expert", global_expert, global_expert.forward),
                ("local_expert", local_expert, local_expert.forward),
                ("gate", gate, gating),
            )
        }
        self._fits = False

    def forward(self, **columns: Tensor) -> Tensor:
        """Return log(h p_l + (1 − h) p_g), shape (B, classes): eq. 5 of the experts' probabilities."""
        own, shared, logit = self._parts(columns)
        return torch.logaddexp(own + F.logsigmoid(logit), shared + F.logsigmoid(-logit))

    def log_mixture(self, **columns: Tensor) -> Tensor:
        """Return h log p_l + (1 − h) log p_g, shape (B, classes), as in the authors' code; not normalised."""
        own, shared, logit = self._parts(columns)
        share = torch.sigmoid(logit)
        return share * own + (1 - share) * shared

    def global_logits(self, **columns: Tensor) -> Tensor:
        """Return the global expert's logits, shape (B, classes)."""
        self._check(columns)
        return self._expert("global_expert", columns)

    def local_logits(self, **columns: Tensor) -> Tensor:
        """Return the local expert's logits, shape (B, classes)."""
        self._check(columns)
        return self._expert("local_expert", columns)

    def share(self, **columns: Tensor) -> Tensor:
        """Return the local expert's share h, shape (B,)."""
        return torch.sigmoid(self._parts(columns)[2]).squeeze(1)

    def _parts(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return log p_l and log p_g, (B, classes), and the gate's logit, (B, 1)."""
        self._check(columns)
        own, shared = self._expert("local_expert", columns), self._expert("global_expert", columns)
        logit = self._logit(columns, own, shared)
        return F.log_softmax(own, 1), F.log_softmax(shared, 1), logit.unsqueeze(1)

    def _expert(self, name: str, columns: Mapping[str, Tensor]) -> Tensor:
        expert = self.get_submodule(name)
        with at_rest(expert):
            out: Tensor = logits_of(expert(**self._takes[name].of(columns)))
        return out

    def _logit(self, columns: Mapping[str, Tensor], own: Tensor, shared: Tensor) -> Tensor:
        given = self._takes["gate"].of({**columns, "local_logits": own, "global_logits": shared})
        with at_rest(self.gate):
            logit: Tensor = self.gate.logit(**given)  # type: ignore[operator]
        return logit

    def _check(self, columns: Mapping[str, Tensor]) -> None:
        """Compare all outputs' shapes at the first use: a mixture is trained long after its global expert."""
        if self._fits:
            return
        mode = self.training
        self.train(False)
        try:
            with torch.no_grad():
                own, shared = self._expert("local_expert", columns), self._expert("global_expert", columns)
                _same_width(own, shared)
                logit = self._logit(columns, own, shared)
        finally:
            self.train(mode)
        if logit.shape != own.shape[:1]:
            raise MethodError(
                "The gate of a mixture wants one number per example, shape {wanted}; {gate}.logit gave {got}.",
                wanted=(len(own),),
                gate=type(self.gate).__name__,
                got=tuple(logit.shape),
            )
        self._fits = True


class Gate(nn.Module):
    """A network with one output through a sigmoid: how much of a prediction is the local expert's.

    Args:
        network: gives (B, 1) or (B,) for the columns that its ``forward`` names, e.g. ``CifarCNN(1)``: the same trunk
            as an expert's, with one unit.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._takes = Takes(f"The gate's network, {type(network).__name__},", network.forward)

    def forward(self, **columns: Tensor) -> Tensor:
        """Return the local expert's share, shape (B,), between 0 and 1."""
        return torch.sigmoid(self.logit(**columns))

    def logit(self, **columns: Tensor) -> Tensor:
        """Return log(h / (1 − h)) of the share h, shape (B,): exact where h itself rounds to 0 or 1.

        Raises:
            MethodError: the network wants a column that is not there, or has not one output.
        """
        out: Tensor = self.network(**self._takes.of(columns))
        if out.dim() == 2 and out.shape[1] == 1:
            return out.squeeze(1)
        if out.dim() != 1:
            raise MethodError(
                "A gate needs a network with one output, shape (B, 1); {network} gave {got}. Make it with one class.",
                network=type(self.network).__name__,
                got=tuple(out.shape),
            )
        return out


class ConfidenceGate(nn.Module):
    """A gate that sees how sure the experts are: their largest log-probabilities, entropies, and whether they agree.

    log(h / (1 − h)) = a · (log max p_l, H(p_l), log max p_g, H(p_g), [same class]) + b (+ a network's logit). a and b
    start at zero, so that without a network both experts weigh the same at first. No gradient flows into the experts
    through it.

    Args:
        network: a gate of its own on the input, e.g. ``Gate(CifarCNN(1))``, that is added; None: nothing is.
    """

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network
        if network is not None:
            self._takes = Takes(f"The gate's network, {type(network).__name__},", network.logit)  # type: ignore[arg-type]
        self.weigh = nn.Linear(CONFIDENCES, 1)
        nn.init.zeros_(self.weigh.weight)
        nn.init.zeros_(self.weigh.bias)

    def logit(self, local_logits: Tensor, global_logits: Tensor, **columns: Tensor) -> Tensor:
        """Return log(h / (1 − h)), shape (B,), for the experts' logits, shape (B, classes) each."""
        own, shared = (F.log_softmax(logits.detach(), 1) for logits in (local_logits, global_logits))
        same = (own.argmax(1) == shared.argmax(1)).to(own.dtype)
        seen = [own.amax(1), _entropy(own), shared.amax(1), _entropy(shared), same]
        logit: Tensor = self.weigh(torch.stack(seen, 1)).squeeze(1)
        if self.network is None:
            return logit
        added: Tensor = self.network.logit(**self._takes.of(columns))  # type: ignore[operator]
        return logit + added


@contextmanager
def at_rest(part: nn.Module) -> Iterator[None]:
    """Let a part that is not trained predict without dropout; its parameters say whether it is."""
    resting = (
        part.training and torch.is_grad_enabled() and not any(p.requires_grad for p in part.parameters())
    )
    if resting:
        part.train(False)
    try:
        yield
    finally:
        if resting:
            part.train()


def _same_width(own: Tensor, shared: Tensor) -> None:
    if own.shape != shared.shape or own.dim() != 2:
        raise MethodError(
            "The experts of a mixture must give logits of one shape, (examples, classes); the local expert gave "
            "{local}, the global expert {shared}. Make both with the same number of classes.",
            local=tuple(own.shape),
            shared=tuple(shared.shape),
        )


def _entropy(log_p: Tensor) -> Tensor:
    """Return the entropy in nats of each row of log-probabilities."""
    return -(log_p.exp() * log_p).sum(1)
