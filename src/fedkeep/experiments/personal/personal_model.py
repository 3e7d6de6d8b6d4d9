"""One client's model as a module that predicts as its method says."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Params, is_state
from fedkeep.methods import Method
from fedkeep.methods.base import Recalls, forward


class PersonalModel(nn.Module):
    """One client's model, of a method that predicts in a way of its own; called with columns by name.

    Args:
        module: holds the client's values.
        method: says how to predict.
        state: what the method keeps beside the model, by name.
    """

    def __init__(self, module: nn.Module, method: Method, state: Params) -> None:
        super().__init__()
        self.module, self._net, self._predict, self._names = module, Net(module), method.predict, list(state)
        # as buffers, whose names have no dot, they move with the module; a whole number, such as which model is the
        # client's, is none, so that the exporter of ONNX knows it
        for place, value in enumerate(state.values()):
            if value.ndim or value.is_floating_point():
                self.register_buffer(f"_state_{place}", value, persistent=False)
            else:
                setattr(self, f"_state_{place}", value)

    def forward(self, **columns: Tensor) -> Any:
        """Return what the method predicts for examples."""
        state = {name: getattr(self, f"_state_{place}") for place, name in enumerate(self._names)}
        return self._predict(self._net, {**tensors_of(self.module), **state}, columns)


def check_module(method: Method) -> None:
    """Raise MethodError where a method looks at a client's own examples to predict, which no module holds."""
    if isinstance(method.predict, Recalls):
        raise MethodError(
            f"{method.name!r} looks at a client's own examples to predict, and a model by itself holds none. Take a "
            f"run of another method."
        )


def as_module(bare: nn.Module, method: Method | None, values: Params) -> nn.Module:
    """Return a copy of a module with one client's values, ready to predict as its method says.

    Args:
        bare: the module, as ``Method.made_for`` made it.
        method: None: the module predicts by itself.
        values: of all of the module's tensors, and the method's state beside them.
    """
    module, state = copy.deepcopy(bare), {n: v for n, v in values.items() if is_state(n)}
    found = {n: v for n, v in values.items() if n not in state}
    module.load_state_dict({**module.state_dict(), **Net(module).placed(found)})  # what is no tensor stays
    if method is None or method.predict is forward:
        return module.eval()
    return PersonalModel(module, method, state).eval()
