"""Methods and links: hooks start and finish, joint clipping, counts, lengths, types and scales of what is sent, faults."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from tests.evidence.blind.common import LR, ONE, Taste, furl, made, plain, quiet_private, with_example
from torch import nn

import fedkeep
from fedkeep import WeightedMean, sgd
from fedkeep.methods import Client, Finish, Finished, Init, Method, Start, Started, terms
from fedkeep.privacy import Encoded, Link
from fedkeep.split import Split


def own(**more):
    """A method of the researcher's own, FURL by hand."""
    return Method(
        name="own", split=Split("user"), client=Client(phases=(ONE,), keep=Init(value="model"), **more)
    )


def blended(f: Finish) -> Finished:
    """'Personalised averaging': what leaves in place of the bias is its mean with the user's vector."""
    return Finished(params={"shared.bias": 0.5 * (f.trained["shared.bias"] + f.trained["user"])})


def case_finish_blends():
    return {
        "name": "finish_blends",
        "leaks": True,
        "what": "Client.finish uploads (bias + user)/2 in place of the federated bias, undeclared by any decorator: bias and user move by the same step, so delta + w tells user (2*(w + delta) - bias').",
        "model": made(Taste, "user"),
        "method": lambda: own(finish=blended),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        # bias' = bias + m and user' = user + m: 2 (bias + delta) = bias + user + 2m; bias as sent is known, m is small
        "tol": 0.2,
        "read": lambda c: (
            2 * (c.first["shared.bias"][0] + c.delta("shared.bias")[0]) - c.first["shared.bias"][0]
        ),
    }


def norm_zero(net):
    return {"spread": torch.zeros(())}


def with_norm(f: Finish) -> Finished:
    """Sends 'how far this client is from the others', for the server's report."""
    return Finished(sends={"spread": f.trained["user"].norm()})


def case_finish_sends_norm():
    return {
        "name": "finish_sends_norm",
        "leaks": True,
        "what": "Client.finish sends the norm of the private vector along as a 'report' (declared in sends, but no decorator says of what it is made): delta server/spread is |user|.",
        "model": made(Taste, "user"),
        "method": lambda: own(finish=with_norm, sends=norm_zero),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "read": lambda c: next(v for n, v in c.of()["deltas"].items() if "spread" in n),
        "expected": lambda s, c: float(c.run.parameters("anna")["user"].norm()),
    }


def warm(s: Start) -> Started:
    """'Warm start': the federated bias begins at the client's own offset, which it is to learn anyway."""
    return Started(params={"shared.bias": s.kept.params["user"].clone()})


def case_start_from_kept():
    return {
        "name": "start_from_kept",
        "leaks": True,
        "what": "Client.start lets the federated bias start from the kept user vector; the upload is the change from what was SENT, so delta + sent bias is user plus one small step.",
        "model": made(Taste, "user"),
        "method": lambda: own(start=warm),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -4.0],
        "tol": 0.1,
        "read": lambda c: c.first["shared.bias"][0] + c.delta("shared.bias")[0],
    }


def first_row(net):
    return {"means": torch.zeros(3, 4)}


def class_means(f: Finish) -> Finished:
    """Class means of the inputs, as FedProto's of features; a class with one example is that example."""
    total, count = torch.zeros(3, 4), torch.zeros(3, 1)
    for x, batch in f.outputs(lambda net, params, batch: batch["x"]):
        one_hot = nn.functional.one_hot(batch["label"], 3).to(x.dtype)
        total, count = total + one_hot.t() @ x, count + one_hot.sum(0)[:, None]
    return Finished(sends={"means": total / count.clamp_min(1)})


def _single(secret=None):
    """Anna's row 3 is her only training example of class 2."""
    from tests.evidence.blind import common
    import numpy as np

    data = common.federation(secret, (0, 3, 1))
    cols = {n: np.array(v) for n, v in data.columns.items()}
    cols["label"][:10] = [0, 1, 0, 2, 1, 0, 1, 0, 1, 0]
    return fedkeep.FederatedData.from_columns(
        client=np.repeat(["anna", "bo", "cy"], 14),
        columns=cols,
        split=(["train"] * 10 + ["valid"] * 2 + ["test"] * 2) * 3,
        meta={"task": "multiclass", "classes": 3},
    )


def case_class_means():
    return {
        "name": "class_means",
        "leaks": True,
        "what": "Client.finish sends class means of raw inputs without saying so by a decorator; a class with a single example gives the example itself: row 2 of server/means.",
        "model": made(Taste),
        "method": lambda: own(finish=class_means, sends=first_row),
        "federation": _single,
        "vary": "example",
        "secrets": [6.25, 9.5, -12.75],
        "read": lambda c: next(v for n, v in c.of()["deltas"].items() if "means" in n)[2, 1],
    }


class Loud(nn.Module):
    """The private scale multiplies the private vector's gradient; the federated gradient does not know it."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        y = self.shared(x)
        if (
            self.training and y.requires_grad
        ):  # the federated gradient is fixed: what shows is the clipping alone
            y.register_hook(lambda g: torch.full_like(g, 1.0 / len(g)))
        return (
            y
            + 0 * self.user.sum()
            + (self.user.square().sum() - self.user.detach().square().sum()) * torch.tensor([5.0, 0, 0])
        )


def _clip(c):
    """|g_p| = |g_f| * sqrt((bound / |seen|)^2 / |g_f|^2 ... ): the scale s = bound / sqrt(|g_f|^2 + |g_p|^2)."""
    seen = -c.delta("shared.bias")[0] / LR  # = s, as the true gradient of the bias is 1
    gf2 = float(
        (c.delta("shared.bias").square().sum() + c.delta("shared.weight").square().sum()) / LR**2 / seen**2
    )
    return float(((0.5 / seen) ** 2 - gf2).clamp_min(0).sqrt())


def _clip_wanted(s, c):
    data = c.run.data
    x, label = torch.tensor(data.columns["x"][:10]), torch.tensor(data.columns["label"][:10])
    p = torch.softmax(x @ c.first["shared.weight"].t() + c.first["shared.bias"], 1)
    g0 = float((p - nn.functional.one_hot(label, 3)).mean(0)[0])
    return float(10 * abs(g0) * c.first["user"].norm())


def case_joint_clipping():
    return {
        "name": "joint_clipping",
        "leaks": True,
        "what": "clip_norm scales federated and private gradients by their JOINT norm: where the federated gradient is known (here it is fixed), the scale of the upload is the private gradient's norm, here 10|g0||user|.",
        "model": made(Loud, "user"),
        "method": lambda: furl(clip_norm=0.5),
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, 1.5, -40.0],
        "tol": 0.05,
        "read": _clip,
        "expected": _clip_wanted,
    }


TOLD = {"value": 0.0}
"""What the model below tells the links of the upload chain, past fedkeep."""


class Telling(Taste):
    def forward(self, x):
        if self.training:
            TOLD["value"] = float(self.user.detach()[0])
        return self.logits(x)


@dataclass(frozen=True)
class Padded(Link):
    """'Blocks' of a length that depends: the change of the bias is padded."""

    rowwise: ClassVar[bool] = False

    def encode(self, tensors, start, draw, state, sent):
        out = dict(tensors)
        more = int((TOLD["value"] + 8) * 4)
        out["shared.bias"] = torch.cat([out["shared.bias"], torch.zeros(more)])
        return Encoded(tensors=out)

    def decode(self, tensors, start, sent):
        return {**tensors, "shared.bias": tensors["shared.bias"][:3]}


def case_padded_length():
    return {
        "name": "padded_length",
        "leaks": True,
        "what": "A link of the upload chain pads a tensor with zeros, as many as a module-level dict says that forward filled from user: (bytes or length - 3) / 4 - 8 is user[0] to a quarter.",
        "model": made(Telling, "user"),
        "method": lambda: furl().but(upload=(Padded(),)),
        "federation": plain,
        "vary": "private",
        "secrets": [0.25, 1.5, -4.0],
        "tol": 1e-6,
        "read": lambda c: (len(c.delta("shared.bias")) - 3) / 4 - 8,
    }


@dataclass(frozen=True)
class Halved(Link):
    """Sends in half precision where 'that suffices'."""

    rowwise: ClassVar[bool] = False

    def encode(self, tensors, start, draw, state, sent):
        kind = torch.float16 if TOLD["value"] > 0 else torch.bfloat16
        return Encoded(tensors={n: v.to(kind) if v.is_floating_point() else v for n, v in tensors.items()})

    def decode(self, tensors, start, sent):
        return {n: v.to(start[n].dtype) for n, v in tensors.items()}


def case_half_precision():
    return {
        "name": "half_precision",
        "leaks": True,
        "what": "A link sends float16 where user[0] > 0 and bfloat16 elsewise: the type of the uploaded tensors (not their bytes' number) is the private sign.",
        "model": made(Telling, "user"),
        "method": lambda: furl().but(upload=(Halved(),)),
        "federation": plain,
        "vary": "private",
        "secrets": [0.25, -1.5, 4.0],
        "read": lambda c: float(c.delta("shared.bias").dtype == torch.float16),
        "expected": lambda s, c: float(s > 0),
    }


@dataclass(frozen=True)
class Levels(Link):
    """8-bit levels of a common scale; 'common' took in the private vector as well."""

    rowwise: ClassVar[bool] = False

    def encode(self, tensors, start, draw, state, sent):
        every = [float(v.abs().max()) for v in tensors.values()] + [abs(TOLD["value"])]
        scale = max(every) / 127
        out = {n: torch.round(v / scale) for n, v in tensors.items()}
        return Encoded(
            tensors={**{n: v.to(torch.int8) for n, v in out.items()}, "scale": torch.tensor(scale)}
        )

    def decode(self, tensors, start, sent):
        return {n: v.float() * tensors["scale"] for n, v in tensors.items() if n != "scale"}


def case_quantiser_scale():
    return {
        "name": "quantiser_scale",
        "leaks": True,
        "what": "An 8-bit quantiser takes its scale over all tensors, private ones included (by a module-level dict): 127 * scale is |user[0]| where that is the largest number.",
        "model": made(Telling, "user"),
        "method": lambda: furl().but(upload=(Levels(),)),
        "federation": plain,
        "vary": "private",
        "secrets": [1.25, 1.5, -4.0],
        "read": lambda c: 127 * c.delta("scale"),
        "expected": lambda s, c: abs(s),
    }


@dataclass(frozen=True, kw_only=True)
class Confident(WeightedMean):
    """A weighted mean whose weights say how sure a client is of itself."""

    def weight(self, examples):
        return examples + round((TOLD["value"] + 8) / 100, 4)


def case_weight_fraction():
    return {
        "name": "weight_fraction",
        "leaks": True,
        "what": "A reduction's weight(), asked on the device, adds (user[0]+8)/100 to the number of examples: the fraction of the uploaded weight is the private value.",
        "model": made(Telling, "user"),
        "method": lambda: furl().on_server(reduce=Confident()),
        "federation": plain,
        "vary": "private",
        "secrets": [0.25, 1.5, -4.0],
        "read": lambda c: (c.of()["weight"] - 10) * 100 - 8,
    }


class Breaks(nn.Module):
    """'Overflows' on strange examples; the round goes on without such clients."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.shared(x) + self.user
        if self.training and x[:, 1].max() > 8:
            y = y * float("inf") * 0
        return y


def case_fault_as_bit():
    return {
        "name": "fault_as_bit",
        "leaks": True,
        "what": "Training breaks down to NaN where a feature of any example is above 8; with on_nonfinite='skip' the missing upload (a fault) is one bit of the examples.",
        "model": made(Breaks),
        "method": furl,
        "federation": with_example(0, 3, 1),
        "vary": "example",
        "plan": {"on_nonfinite": "skip"},
        "secrets": [6.25, 9.5, -12.75],
        "read": lambda c: float(c.of()["fault"] is not None),
        "expected": lambda s, c: float(s > 8),
    }


class Gated(nn.Module):
    """A detached private gate scales the shared logits."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, x):
        return self.shared(x) * (1 + torch.sigmoid(self.user.detach())) + self.user


def case_detached_gate():
    return {
        "name": "detached_gate",
        "leaks": False,
        "what": "The shared logits are multiplied by 1 + sigmoid(user.detach()): detach looks suspicious, but what leaves is the true gradient of the loss by federated weights.",
        "model": made(Gated, "user"),
        "method": furl,
        "federation": plain,
        "vary": "private",
        "secrets": [0.3, -1.7],
        "quiet": quiet_private(("user",)),
    }
