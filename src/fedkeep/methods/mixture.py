"""Federated mixture of experts: a federated expert, and on every client an expert of its own and a gate.

Source: Federated learning using a mixture of experts, arXiv:2010.02056, §3; algorithm 1 and the authors' code of
November 2020 where the text is silent.
(1) FedAvg trains the global expert on opted-in examples alone (eq. 3); what follows happens on each device, on all its
examples, and nothing of it leaves: (2) the local expert is trained (eq. 4); (3) local expert, gate and a copy of the
global expert are trained on −log(h p_l[y] + (1 − h) p_g[y]) (eq. 5 and 6). The copy is the client's own; the server's
global expert stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.declared import declare, declared
from fedkeep.core.errors import MethodError, check_choice
from fedkeep.core.heads import caught, found_head, is_convolution
from fedkeep.core.net import Net, Takes
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Batch, Params, clone, misfit, prefixed, under
from fedkeep.methods.added_parts import drawn_for
from fedkeep.methods.base import Adapt, Method, forward
from fedkeep.methods.client import Client
from fedkeep.methods.features import Known, pooled_by, width
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.labels import class_of
from fedkeep.methods.phase import EarlyStopping, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, CrossEntropy, Term, TermSum, example_mean
from fedkeep.models.mixture_model import MixtureOfExperts
from fedkeep.split import Split


@dataclass(frozen=True)
class OnOutput(Around):
    """A term of what another method of the model returns.

    Attributes:
        output: the method, e.g. ``global_logits``.
        term: the term.
    """

    output: str
    term: Term

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.term(Known(net, self.output), params, batch, received)


@dataclass(frozen=True)
class NegativeLogLikelihood(Term):
    """−net(batch)[label] of log-probabilities as they are, not normalised; the mean over examples.

    Attributes:
        label: the column that holds the class, 0-based.
    """

    label: str = "label"

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        chosen = net(params, batch).gather(1, class_of(batch, self.label).unsqueeze(1)).squeeze(1)
        return example_mean(-chosen, batch.get("weight"))


@dataclass(frozen=True)
class PredictOutput:
    """Predict with another method of the model than ``forward``.

    Attributes:
        output: the method.
    """

    output: str

    def __call__(self, net: Net, params: Params, batch: Batch) -> Any:
        """Return the model's output."""
        return net.call(self.output, params, batch)


def as_likelihood(term: Term) -> Term:
    """Return a loss whose cross-entropies take log-probabilities as they are.

    Raises:
        MethodError: one of them is of several outputs, of smoothed labels, or of weighted classes.
    """
    if isinstance(term, CrossEntropy):
        if term.task is not None:
            raise MethodError("mix='logprob' mixes one output; the loss names a task. Use mix='probability'.")
        if term.smoothing:
            raise MethodError("mix='logprob' knows no label smoothing. Use mix='probability'.")
        if term.class_weights is not None:
            raise MethodError("mix='logprob' knows no class weights. Use mix='probability'.")
        return NegativeLogLikelihood(term.label)
    if isinstance(term, TermSum):
        return TermSum(tuple(map(as_likelihood, term.terms)))
    inner = getattr(term, "term", None)  # a term around another one: scaled, of augmented images
    return replace(term, term=as_likelihood(inner)) if isinstance(inner, Term) else term  # type: ignore[call-arg]


GLOBAL, LOCAL, GATE = "global_expert.", "local_expert.", "gate."
OWN = Split((f"{LOCAL}*", f"{GATE}*"))
OUTPUTS = ("global_logits", "local_logits", "log_mixture")


def local_from_global(params: Params) -> Params:
    """Return the local expert's values where it starts as a copy of the global one.

    Raises:
        MethodError: the experts differ in architecture.
    """
    copies = prefixed(LOCAL, clone(under(GLOBAL, params)))
    own = {n: v for n, v in params.items() if n.startswith(LOCAL)}
    fault = misfit(own, copies)
    if fault:
        raise MethodError(
            "local_init='finetuned' starts the local expert from the global one, so both must have the same layers; "
            "they differ: {fault}. Use local_init='scratch', or one architecture for both.",
            fault=fault,
        )
    return copies


class FeatureGate(nn.Module):
    """A gate with a network of its own: a model's, with one output in place of its head.

    Args:
        network: the model; it is changed.
        head: its head.
    """

    def __init__(self, network: nn.Module, head: str) -> None:
        super().__init__()
        self.head, self.channels = head, is_convolution(network.get_submodule(head))
        self.score = nn.Linear(width(network, head), 1)
        network.set_submodule(head, nn.Identity())
        self.network = network
        self._takes = Takes(f"The gate's network, {type(network).__name__},", network.forward)

    def logit(self, **columns: Tensor) -> Tensor:
        """Return log(h / (1 − h)) of the local expert's share h, shape (B,)."""
        layer = self.network.get_submodule(self.head)
        mine = {n: v for n, v in columns.items() if n not in ("local_logits", "global_logits")}
        found = caught(layer, partial(self.network, **self._takes.of(mine)), self.head)
        found = found.movedim(1, -1) if self.channels else found
        pooled = pooled_by("mean", found, columns).to(self.score.weight.dtype)  # autocast's are narrow
        logit: Tensor = self.score(pooled).squeeze(1)
        return logit


@dataclass(frozen=True)
class Experts:
    """Makes a mixture of a model, if it is none: two experts like it, and a gate like it with one output.

    Attributes:
        head: where the model ends.
        finetunes: the local expert of such a mixture starts from the federated one.
    """

    head: str = "classifier"
    finetunes: bool = True

    def has_parts(self, module: nn.Module) -> bool:
        """Tell whether a module has the parts and outputs that the method trains."""
        parts = {name.split(".", 1)[0] for name, _ in module.named_parameters()}
        wanted = {GLOBAL[:-1], LOCAL[:-1], GATE[:-1]}
        return wanted <= parts and all(callable(getattr(module, name, None)) for name in OUTPUTS)

    def adjusted(self, method: Method) -> Method:
        """Return the method for a mixture that is made here."""
        return method.adapting(start=local_from_global) if self.finetunes else method

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return the mixture.

        Raises:
            MethodError: the module is none, and its head was not looked for.
        """
        if self.has_parts(module):
            return module
        if found_head(module) is None:
            raise MethodError(
                "'mixture' trains a global expert, a local expert and a gate; {module} has not these "
                "parts. Join three networks: models.MixtureOfExperts(global_expert, local_expert, gate).",
                module=type(module).__name__,
            )
        with drawn_for(module, "gate"):
            gate = FeatureGate(copied(module), self.head)
        whole = MixtureOfExperts(module, copied(module), gate)
        tables = {
            f"{prefix}{name}": column
            for prefix in (GLOBAL, LOCAL)
            for name, column in declared(module).lookup.items()
        }
        return declare(whole, lookup=tables)


@telling
def mixture(
    *,
    tune_global: Literal["local_copy", "frozen", "gate_only"] = "local_copy",
    local_init: Literal["scratch", "finetuned"] | None = None,
    mix: Literal["probability", "logprob"] = "probability",
    local: Phase = Phase(),
    server: Server = Server(),
    mu: float = 0.0,
    local_optimizer: Optimizer | None = None,
    local_epochs: int = 200,
    mixture_optimizer: Optimizer | None = None,
    mixture_epochs: int = 200,
    early_stopping: EarlyStopping | None = EarlyStopping(required=False),
) -> Method:
    """Return the federated mixture of experts. The paper's own rate is Adam's 1e-4, with 3 passes a round in batches of 10.

    Rounds compute and train the global expert alone; its clients get experts and gates of their own by adapting
    (``experiments.personalize.cold_start``). The model is a ``models.MixtureOfExperts``, or any
    classifier: then one is made of it.

    Args:
        tune_global: what step 3 trains beside the gate: ``"local_copy"``: the local expert and the client's own copy
            of the global one (eq. 6); ``"frozen"``: the local expert (the authors' later code); ``"gate_only"``:
            nothing.
        local_init: the local expert starts step 2 from the module's values (algorithm 1), or as a copy of the global
            expert, which step 2 then fine-tunes (the authors' later code). None: as a copy where the mixture is made
            of a plain model, elsewise from the module's values.
        mix: h p_l + (1 − h) p_g, a proper mixture; or ``"logprob"``: h log p_l + (1 − h) log p_g, which is not
            normalised (the authors' code).
        local: the phase of the global expert in rounds (FedAvg's); its loss, batch size and bound hold in all steps,
            and the mixture's cross-entropy is that of the mixed probabilities.
        server: see ``methods``.
        mu: pulls the global expert towards the received one (FedProx); 0: not.
        local_optimizer, local_epochs: of step 2; by default the rounds' optimiser, and at most so many passes.
        mixture_optimizer, mixture_epochs: of step 3, likewise.
        early_stopping: of steps 2 and 3, by the client's own validation loss; None: all passes, which a client without a
            validation example takes by default, too.

    Raises:
        MethodError: an unknown choice.
    """
    check_choice("tune_global must be", tune_global, ("local_copy", "frozen", "gate_only"), MethodError)
    if local_init is not None:
        check_choice("local_init must be", local_init, ("scratch", "finetuned"), MethodError)
    check_choice("mix must be", mix, ("probability", "logprob"), MethodError)
    shared = local.but(loss=OnOutput(output="global_logits", term=local.loss), trains="federated")
    if mu:
        shared = shared.but(loss=shared.loss + Proximal(mu=float(mu)))
    own = local.but(
        loss=OnOutput(output="local_logits", term=local.loss),
        trains=(f"{LOCAL}*",),
        examples="all",
        optimizer=local_optimizer or local.optimizer,
        epochs=local_epochs,
        early_stopping=early_stopping,
    )
    trained: dict[str, str | tuple[str, ...]] = {
        "local_copy": "all",
        "frozen": "private",
        "gate_only": (f"{GATE}*",),
    }
    proper = mix == "probability"
    mixed = local.loss if proper else OnOutput(output="log_mixture", term=as_likelihood(local.loss))
    joint = own.but(
        loss=mixed,
        trains=trained[tune_global],
        optimizer=mixture_optimizer or local.optimizer,
        epochs=mixture_epochs,
    )
    adapt = Adapt(
        phases=(own, joint),
        split=Split("*") if tune_global == "local_copy" else None,
        start=local_from_global if local_init == "finetuned" else None,
        everyone=True,
    )
    return Method(
        name="mixture",
        split=OWN,
        client=Client(phases=(shared,)),
        server=server,
        adapt=adapt,
        predict=forward if proper else PredictOutput(output="log_mixture"),
        predict_shared=PredictOutput(output="global_logits"),
        extend=Experts(finetunes=local_init is None),
    )
