"""What the cases share: tiny federations, plain phases, and how a secret is varied. No case leaks by this file."""

import numpy as np
import torch
from torch import nn

import fedkeep
from fedkeep import Phase, sgd
from fedkeep.methods import Client, Init, Method, terms
from fedkeep.split import Split

LR = 0.125
ONE = Phase(optimizer=sgd(LR), batch_size=64)  # a round is one step, so that reading is easy to show


def federation(secret=None, place=None, *, out=False, out_more=0, judged_out=False):
    """3 clients, 14 examples each: 10 train, 2 valid, 2 test. `place` = (client, row, feature) gets `secret`.

    Rows 0..9 of a client are train, 10, 11 valid, 12, 13 test. With `out` the train rows 8 and 9 are opted out
    (of client 0 also `out_more` further ones); with `judged_out` also row 13.
    """
    draw = np.random.default_rng(7)
    clients, each = ["anna", "bo", "cy"], 14
    x = draw.normal(0, 1, (len(clients) * each, 4)).astype("f4")
    label = draw.integers(0, 3, len(x))
    label[:3] = [0, 1, 2]
    if place is not None and secret is not None:
        client, row, feature = place
        if feature == "label":
            label[client * each + row] = int(secret)
        else:
            x[client * each + row, feature] = secret
    columns = {"x": x, "label": label}
    if out:
        inside = np.ones(len(x), bool)
        for c in range(3):
            inside[c * each + 8 : c * each + 10] = False
        inside[8 - out_more : 8] = False
        if judged_out:
            inside[13::each] = False
        columns["opted_in"] = inside
    split = (["train"] * 10 + ["valid"] * 2 + ["test"] * 2) * 3
    return fedkeep.FederatedData.from_columns(
        client=np.repeat(clients, each),
        columns=columns,
        split=split,
        meta={"task": "multiclass", "classes": 3},
    )


def plain(secret=None):
    return federation()


def opted(secret=None):
    return federation(out=True)


def with_example(*place, **more):
    """A federation maker in which one number of one example is the secret."""
    return lambda secret=None: federation(secret, place, **more)


def made(kind, name=None, index=0):
    """A model maker; who varies gives `secret`, which takes the place of one number of the private parameter."""

    def model(secret=None):
        torch.manual_seed(3)
        m = kind()
        if name is not None and secret is not None:
            with torch.no_grad():
                dict(m.named_parameters())[name].view(-1)[index] = float(secret)
        return m

    return model


def furl(private="user", **more):
    return fedkeep.methods.furl(private, private_init="model", local=ONE.but(**more))


class Taste(nn.Module):
    """The plain model: W x + b + user."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.user = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def logits(self, x):
        return self.shared(x) + self.user

    def forward(self, x):
        return self.logits(x)


class Two(nn.Module):
    """A federated branch and a private one, for methods whose private phase sees opted-out examples."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 3)
        self.own = nn.Linear(4, 3)

    def forward(self, x):
        return self.shared(x) + self.own(x)


def quiet_private(private, base=ONE):
    """A check of harmless cases: with all federated rates at zero no delta, weight or byte depends on the secret."""

    def check(run, case):
        names = [n for n, _ in case["model"]().named_parameters() if not Split(private).is_private(n)]
        still = furl(private, optimizer=sgd(LR, rates=dict.fromkeys(names, 0.0)))
        a, b = (run(case, s, method=still) for s in case["secrets"][:2])
        return f"at zero federated rates these differ: {a.same(b, loss=False)}"

    return check
