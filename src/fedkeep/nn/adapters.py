"""Low-rank adapters (LoRA) on the linear layers of any module, named and saved as ``peft`` does.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685, §4.1: W x + (α / r) B A x, with
B = 0 at first. A layer ``X`` keeps its own weights, frozen, as ``X.base_layer.weight``; beside them stand
``X.lora_A.NAME.weight`` (r, inputs) and ``X.lora_B.NAME.weight`` (outputs, r).
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import ConfigError, did_you_mean, raising
from fedkeep.core.files import expanded, read_tensors, write_tensors, write_whole
from fedkeep.core.params import Params

PREFIX = "base_model.model."  # before every name in a file of peft's
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdaptedLinear(nn.Module):
    """A linear layer with adapters, whose outputs add up.

    Args:
        base: the layer: ``nn.Linear``, or transformers' ``Conv1D``, whose weight is (inputs, outputs).
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B, self.lora_dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}

    def add(self, name: str, rank: int, alpha: float, dropout: float) -> None:
        """Add an adapter that changes nothing yet: A is drawn as ``nn.Linear`` draws, B is zero."""
        weight: Any = self.base_layer.weight
        inputs, outputs = weight.shape if turned(self.base_layer) else weight.shape[::-1]
        like = {"bias": False, "dtype": weight.dtype, "device": weight.device}
        self.lora_A[name], self.lora_B[name] = (
            nn.Linear(inputs, rank, **like),
            nn.Linear(rank, outputs, **like),
        )
        nn.init.zeros_(self.lora_B[name].weight)  # type: ignore[arg-type]
        self.lora_dropout[name] = nn.Dropout(dropout)
        self.scaling[name] = alpha / rank

    def extra_repr(self) -> str:
        """Return the factor of each adapter's output, by name."""
        return ", ".join(f"{name}={scale:g}" for name, scale in self.scaling.items())

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, and what the adapters add: (..., inputs) to (..., outputs)."""
        found: Tensor = self.base_layer(x)
        for name, scale in self.scaling.items():
            found = found + self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * scale
        return found


def turned(layer: nn.Module) -> bool:
    """Tell whether a layer is transformers' ``Conv1D``: linear, with the weight turned round."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def adapters(
    model: nn.Module,
    rank: int,
    on: str | Sequence[str] = "*",
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    train: str | Sequence[str] = (),
    name: str = "default",
) -> nn.Module:
    """Return a copy of a model with a low-rank adapter on linear layers; all other parameters are frozen.

    A layer that stands at several places has the same adapter at all of them, whichever of its names a pattern matches.

    ``Split`` says of each factor whether it is private (``"*.lora_B.*"``), federated, or frozen. Called again on the
    result with another ``name``, it adds a second adapter beside the first.

    Args:
        model: any module; it is not changed.
        rank: r.
        on: patterns of the layers, by their names in the model, e.g. ``["*.query", "*.value"]``.
        alpha: α; by default the rank, so that adapters are added as they are.
        dropout: of what goes into an adapter, in training.
        train: patterns of other parameters that stay trainable, e.g. ``"classifier.*"``.
        name: the adapter's.

    Raises:
        ConfigError: a pattern matches no linear layer or no parameter, or the adapter is there already.
    """
    if rank < 1 or not 0 <= dropout < 1 or not name.isidentifier():
        raise ConfigError(
            "Wanted rank ≥ 1, 0 ≤ dropout < 1, a word as name; got {rank}, {dropout}, {name!r}.",
            rank=rank,
            dropout=dropout,
            name=name,
        )
    model = copied(model)
    layers = dict(_layers(model))
    chosen = {id(layer): layer for layer_name, layer in layers.items() if _any(layer_name, on)}
    patterns = [on] if isinstance(on, str) else on
    for wrong in (p for p in patterns if not any(fnmatchcase(layer, p) for layer in layers)):
        raise ConfigError(
            "{layer!r} matches no linear layer of {model}.{near}",
            layer=wrong,
            model=type(model).__name__,
            near=did_you_mean(wrong, layers) or f" They are {list(layers)[:20]}.",
        )
    for parameter_name, parameter in model.named_parameters():
        added = ".lora_A." in parameter_name or ".lora_B." in parameter_name
        parameter.requires_grad_((added and parameter.requires_grad) or _any(parameter_name, train))
    for pattern in [train] if isinstance(train, str) else train:
        if not any(fnmatchcase(each, pattern) for each, _ in model.named_parameters()):
            names = [each for each, _ in model.named_parameters()]
            raise ConfigError(
                "{pattern!r} matches no parameter to train.{near}",
                pattern=pattern,
                near=did_you_mean(pattern, names),
            )
    for layer in chosen.values():
        places = [place for place, each in layers.items() if each is layer]
        if not isinstance(layer, AdaptedLinear):
            layer = AdaptedLinear(layer)
            for owner, _, leaf in (place.rpartition(".") for place in places):
                setattr(model.get_submodule(owner), leaf, layer)
        if name in layer.scaling:
            raise ConfigError(
                "{place!r} has an adapter {name!r} already. Give the new one another name.",
                place=places[0],
                name=name,
            )
        layer.add(name, rank, float(rank if alpha is None else alpha), dropout)
        layer.train(model.training)
    for block in model.modules():
        if isinstance(block, nn.TransformerEncoderLayer):
            block.activation_relu_or_gelu = 0  # torch's fast path would read the weights past the adapters
    return model


def save_adapter(
    model: nn.Module, folder: str | Path, params: Mapping[str, Tensor] | None = None, *, name: str = "default"
) -> None:
    """Write an adapter, and what else is trained, as ``peft`` does: two files that ``PeftModel`` reads.

    Where the model was read from a folder or a hub, the file names it, and ``peft.AutoPeftModel`` needs nothing else. Of a
    layer that stands at several places ``PeftModel`` adapts the first alone.

    Args:
        model: what ``adapters`` returned, or a ``PeftModel``, whose adapter may be of any kind.
        folder: where to.
        params: values to write instead of the module's own, e.g. ``run.parameters(client)``.
        name: of the adapter.

    Raises:
        ConfigError: the model has no such adapter, or its layers differ in rank or α.
    """
    if is_peft(model):
        _save_peft(model, expanded(folder), params or {}, name)
        return
    layers = {n: m for n, m in model.named_modules() if isinstance(m, AdaptedLinear) and name in m.scaling}
    kinds = {
        (
            m.get_parameter(f"lora_A.{name}.weight").shape[0],
            m.scaling[name],
            m.lora_dropout[name].p,
            turned(m.base_layer),
        )
        for m in layers.values()
    }
    if len(kinds) != 1:
        raise ConfigError(
            "Wanted an adapter {name!r}, of one rank, α and kind of layer; found {count}.",
            name=name,
            count=len(kinds),
        )
    ((rank, scale, dropout, turn),) = kinds
    # a layer that another adapter alone is on has in this file the name that it has without
    bare = {
        f"{n}.base_layer": n
        for n, m in model.named_modules()
        if isinstance(m, AdaptedLinear) and n not in layers
    }
    values, written, others = {**model.state_dict(), **(params or {})}, Params(), set[str]()
    for parameter, held in model.named_parameters():
        if f".lora_A.{name}." in parameter or f".lora_B.{name}." in parameter:
            written[PREFIX + parameter.replace(f".{name}.weight", ".weight")] = values[parameter]
        elif held.requires_grad and ".lora_" not in parameter:
            layer, dot, leaf = parameter.rpartition(".")
            layer = bare.get(layer, layer)
            written[PREFIX + layer + dot + leaf] = values[parameter]
            others.add(layer)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(model, "name_or_path", None) or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": dropout,
        "target_modules": sorted(layers),
        "modules_to_save": sorted(others) or None,
        "bias": "none",
        "fan_in_fan_out": turn,
    }
    expanded(folder).mkdir(parents=True, exist_ok=True)
    write_tensors(expanded(folder) / WEIGHTS, {n: v.detach().contiguous() for n, v in written.items()})
    write_whole(expanded(folder) / CONFIG, json.dumps(config, indent=2).encode())


def load_adapter(model: nn.Module, folder: str | Path, *, name: str = "default") -> nn.Module:
    """Return a copy of a model with an adapter that ``save_adapter`` or ``peft`` wrote.

    Args:
        model: any module, which takes LoRA alone; or a ``PeftModel``, whose adapter of this name has the file's values then.
        folder: that holds the adapter.
        name: of the adapter in the model.

    Raises:
        ConfigError: the folder holds another kind of adapter, or one that does not fit the model.
    """
    config, found = _read(expanded(folder))
    if is_peft(model):
        return _load_peft(model, folder, config, found, name)
    found = {n.removeprefix(PREFIX): v for n, v in found.items()}
    special = [k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if config.get(k)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none" or special:
        raise ConfigError(
            "Wanted a plain LoRA adapter in {folder}; it is {kind} {special}.",
            folder=folder,
            kind=config.get("peft_type"),
            special=special,
        )
    on = [n.removesuffix(".lora_A.weight") for n in found if n.endswith(".lora_A.weight")]
    names = [n for n, _ in model.named_parameters()]
    others = [_named(n, names) for n in found if ".lora_" not in n]
    made = adapters(
        model,
        config["r"],
        on,
        alpha=config["lora_alpha"],
        dropout=config["lora_dropout"],
        train=others,
        name=name,
    )
    held = dict(made.named_parameters())
    with torch.no_grad():
        for saved, value in found.items():
            added = f"{saved.removesuffix('.weight')}.{name}.weight"
            own = held[added if ".lora_" in saved else _named(saved, held)]
            if own.shape != value.shape:
                raise ConfigError(
                    "{name!r} is {got}; the model wants {wanted}.",
                    name=saved,
                    got=tuple(value.shape),
                    wanted=tuple(own.shape),
                )
            own.copy_(value)
    return made


def is_peft(model: nn.Module) -> bool:
    """Tell whether a model is a ``PeftModel``, without importing ``peft``."""
    return any(
        kind.__module__.split(".")[0] == "peft" and kind.__name__ == "PeftModel"
        for kind in type(model).__mro__
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what an adapter's two files hold."""
    with raising(
        ConfigError,
        "Wanted {config} and {weights} in {folder}: {why}",
        OSError,
        ValueError,
        config=CONFIG,
        weights=WEIGHTS,
        folder=folder,
    ):
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} holds no object.")
        return config, dict(read_tensors(folder / WEIGHTS))


def _peft_config(model: Any, name: str) -> Any:
    if name not in model.peft_config:
        raise ConfigError(
            "The PeftModel has no adapter {name!r}; it has {known}. Say which with name=.",
            name=name,
            known=", ".join(map(repr, model.peft_config)),
        )
    return model.peft_config[name]


def _save_peft(model: nn.Module, folder: Path, params: Mapping[str, Tensor], name: str) -> None:
    peft = importlib.import_module("peft")
    config = copy.copy(_peft_config(model, name))
    config.inference_mode = True
    values = {**model.state_dict(), **params}
    written = peft.get_peft_model_state_dict(model, state_dict=values, adapter_name=name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / WEIGHTS, {n: v.detach().contiguous() for n, v in written.items()})
    config.save_pretrained(str(folder))


def _load_peft(
    model: nn.Module, folder: str | Path, config: Mapping[str, Any], found: dict[str, Tensor], name: str
) -> nn.Module:
    peft = importlib.import_module("peft")
    own = _peft_config(model, name).to_dict()
    for key in ("peft_type", "r", "lora_alpha", "use_dora", "use_rslora"):
        if key in own and config.get(key, own[key]) != own[key]:
            raise ConfigError(
                "{folder} holds an adapter with {key} = {got}; the model's adapter {name!r} has {wanted}.",
                folder=folder,
                key=key,
                got=config[key],
                name=name,
                wanted=own[key],
            )
    made = copied(model)
    wanted = peft.get_peft_model_state_dict(made, adapter_name=name)
    for tensor in sorted({*wanted, *found}):
        shapes = [tuple(side[tensor].shape) if tensor in side else "not there" for side in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                "{folder} holds an adapter of another model: {tensor!r} is {got}; the model wants {wanted}.",
                folder=folder,
                tensor=tensor,
                got=shapes[0],
                wanted=shapes[1],
            )
    peft.set_peft_model_state_dict(made, found, adapter_name=name)
    return made


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can have adapters, by each of their names.

    Others, as attention's own projection, are read past their forward.
    """
    inside = {id(m.base_layer) for m in model.modules() if isinstance(m, AdaptedLinear)}
    for name, layer in model.named_modules(remove_duplicate=False):
        kind = type(layer) is nn.Linear or turned(layer) or isinstance(layer, AdaptedLinear)
        if kind and name and ".lora_" not in name and id(layer) not in inside:
            yield name, layer


def _named(saved: str, names: Container[str]) -> str:
    """Return what a model calls a parameter of a file; a layer is called otherwise once it has an adapter."""
    layer, dot, leaf = saved.rpartition(".")
    ways = (saved, f"{layer.removesuffix('.base_layer')}{dot}{leaf}", f"{layer}.base_layer.{leaf}")
    return next((way for way in ways if way in names), saved)


def _any(name: str, patterns: str | Sequence[str]) -> bool:
    given = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for pattern in given)
