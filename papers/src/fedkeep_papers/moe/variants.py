"""How clients get models of their own from one run of FedAvg: the paper's four ways, and variants of the mixture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from fedkeep.core.errors import ConfigError, check_choice
from fedkeep.core.optim import adam
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_model
from fedkeep.experiments.config import Config, ModelConfig
from fedkeep.methods import EarlyStopping, Method, Phase, fine_tuned, local, mixture
from fedkeep.methods.augment import Augmented
from fedkeep_papers.moe.scene import Adapting, Scene

EXPERTS: dict[str, dict[str, Any]] = {
    "small": {"kind": "cnn", "widths": [3, 6], "hidden": [24, 16]},
    "linear": {"kind": "fedkeep_papers.moe.experts:OnPixels"},
}
"""Architectures of local experts beside the paper's: tables of a configuration."""

Kind = Literal["fedavg", "local", "fine_tuned", "mixture"]


@dataclass(frozen=True)
class Variant:
    """A way to a client's model; the defaults are the paper's mixture.

    Attributes:
        name: in tables.
        kind: FedAvg's global model, local training, fine-tuning, or the mixture.
        tune_global, local_init, mix: as for ``methods.mixture``.
        gate: ``"network"``, one like the experts' (paper); ``"confidence"``, on the experts' outputs; ``"both"``.
        augment: images are shifted and mirrored at random while a client adapts.
        weight_decay: decoupled, while a client adapts.
        expert: the local expert's architecture, of ``EXPERTS``; empty: the scene's network, as the global expert's.
    """

    name: str
    kind: Kind = "mixture"
    tune_global: Literal["local_copy", "frozen", "gate_only"] = "local_copy"
    local_init: Literal["scratch", "finetuned"] = "scratch"
    mix: Literal["probability", "logprob"] = "probability"
    gate: Literal["network", "confidence", "both"] = "network"
    augment: bool = False
    weight_decay: float = 0.0
    expert: str = ""

    def __post_init__(self) -> None:
        if not self.expert:
            return
        check_choice("A local expert's architecture must be", self.expert, EXPERTS)
        if self.kind == "fine_tuned" or self.local_init == "finetuned":
            raise ConfigError(
                "A local expert that starts from the global one has its architecture; got {expert!r} as another. "
                "Train it from scratch: local_init='scratch'.",
                expert=self.expert,
            )

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as plain data."""
        own = asdict(self)
        del own["name"]
        if not self.expert:
            del own["expert"]
        keep = {"fedavg": ("kind",), "local": ("kind", "augment", "weight_decay", "expert")}
        keep["fine_tuned"] = keep["local"]
        return {n: v for n, v in own.items() if n in keep.get(self.kind, own)}

    @property
    def needs_federation(self) -> bool:
        """False for local training, which no other client has a part in."""
        return self.kind != "local"

    @property
    def first(self) -> Variant:
        """The variant whose models this one's local experts are: step 2 of the mixture."""
        return replace(self, name="", kind="local" if self.local_init == "scratch" else "fine_tuned")


FEDAVG, LOCAL = Variant("FedAvg", "fedavg"), Variant("Local", "local")
TUNED, MIXTURE = Variant("Fine-tuned", "fine_tuned"), Variant("Mixture")
PAPER = (FEDAVG, LOCAL, TUNED, MIXTURE)
AUTHORS = Variant("Mixture of log-probabilities (the authors' code)", mix="logprob")
FROM_TUNED = Variant("Mixture, local expert from the fine-tuned model", local_init="finetuned")
KINDS = (
    Variant("Local, small CNN", "local", expert="small"),
    Variant("Local, linear", "local", expert="linear"),
    Variant("Mixture, small CNN", expert="small"),
    Variant("Mixture, linear", expert="linear"),
)
OTHERS = (
    AUTHORS,
    Variant("Mixture, global expert frozen", tune_global="frozen"),
    Variant("Mixture, gate alone", tune_global="gate_only"),
    FROM_TUNED,
    Variant("Mixture, gate on confidences", gate="confidence"),
    Variant(
        "Mixture, fine-tuned local expert, gate on confidences", local_init="finetuned", gate="confidence"
    ),
)
AUGMENTED = (
    Variant("Local, augmented", "local", augment=True),
    Variant("Fine-tuned, augmented", "fine_tuned", augment=True),
    Variant("Mixture, augmented", augment=True),
    Variant("Mixture, fine-tuned local expert, augmented", local_init="finetuned", augment=True),
)


def mixture_model(scene: Scene, variant: Variant, data: FederatedData) -> nn.Module:
    """Return the model of a mixture; its global expert starts as FedAvg's model does, from the same seed."""
    expert = {"kind": scene.model}
    local = EXPERTS[variant.expert] if variant.expert else expert
    gate: dict[str, Any] = {"kind": "gate", "network": {**expert, "classes": 1}}
    if variant.gate != "network":
        gate = {"kind": "confidence_gate", **({"network": gate} if variant.gate == "both" else {})}
    tables = {"kind": "mixture_of_experts", "global_expert": expert, "local_expert": local, "gate": gate}
    whole = Config.model_validate(
        {
            "seed": scene.seed,
            "data": scene.tables(),
            "model": ModelConfig.model_validate(tables),
            "method": {"kind": "mixture"},
            "run": {"rounds": 0},
        }
    )
    return build_model(whole, data)


def adapting_method(variant: Variant, settings: Adapting) -> Method:
    """Return the method by which a client adapts, whole: step 2 included."""
    optimizer = adam(
        settings.learning_rate, weight_decay=variant.weight_decay, decoupled=bool(variant.weight_decay)
    )
    stop = EarlyStopping(every=settings.every, patience=settings.patience)
    if variant.kind == "mixture":
        method = mixture(
            tune_global=variant.tune_global,
            local_init=variant.local_init,
            mix=variant.mix,
            local_epochs=settings.epochs,
            mixture_epochs=settings.epochs,
            early_stopping=stop,
            local=Phase(optimizer=optimizer, batch_size=settings.batch_size, epochs=3),
        )
    elif variant.kind == "local":
        phase = Phase(
            optimizer=optimizer,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            examples="all",
            early_stopping=stop,
        )
        method = local(local=Phase(optimizer=optimizer, batch_size=settings.batch_size)).adapting(
            phases=(phase,)
        )
    else:
        method = fine_tuned(
            tune_epochs=settings.epochs,
            early_stopping=stop,
            local=Phase(optimizer=optimizer, batch_size=settings.batch_size),
        )
    if not variant.augment:
        return method
    return method.adapting(phases=tuple(replace(p, loss=Augmented(p.loss)) for p in method.adapt.phases))


def from_given_experts(method: Method) -> Method:
    """Return a mixture whose local experts are trained already: step 2 takes no step, step 3 keeps its draws."""
    own, joint = method.adapt.phases
    return method.adapting(phases=(replace(own, epochs=0, early_stopping=None), joint), start=None)
