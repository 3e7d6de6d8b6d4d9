"""The split-constraint checker: does training with this split equal training one joint model?

Source: FURL, §3.1–3.3. A split is sound if (1) a user's loss does not depend on another user's private parameters,
(2) the federated update does not depend on private parameters, and (3) a user's private update depends on nothing
but that user's private values and the users' summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import SplitError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, clone, weighted_mean
from fedkeep.split.split import Split

Loss = Callable[[Params, Params, Batch, int], Tensor]
FederatedUpdate = Callable[[Params, Sequence[Params], Params, Sequence[float]], Params]
PrivateUpdate = Callable[[int, Params, Params, Params, Sequence[Params], Sequence[float]], Params]

EQUATIONS = {
    1: "independent local training: ∂L(user i)/∂w_p(user j) = 0",
    2: "federated update: a_f(w_f, u_f of all users, summaries)",
    3: "private update: a_p(w_p, u_p of the same user, summaries)",
}


@dataclass(frozen=True)
class Joint:
    """One training step of a model that holds every user's private parameters.

    Attributes:
        loss: ``(federated, private, batch, user) -> scalar``; ``private`` holds tables of shape (users, *shape), and
            ``batch`` belongs to ``user``.
        federated_update: ``(w_f, [u_f of each user], private tables after training, summaries) -> new w_f`` (a_f).
        private_update: ``(user, w_f, private tables before, private tables after training, [u_f], summaries)
            -> the user's new private values`` (a_p).
    """

    loss: Loss
    federated_update: FederatedUpdate
    private_update: PrivateUpdate


@dataclass(frozen=True)
class Violation:
    """A broken constraint: its equation's number (FURL eq. 1–3), the parameter, and what was seen."""

    equation: int
    parameter: str
    seen: str

    def __str__(self) -> str:
        return f"Equation ({self.equation}) is violated by {self.parameter!r} ({EQUATIONS[self.equation]}): {self.seen}"


@dataclass(frozen=True)
class CheckReport:
    """What the checker found: the split's table, the violations, and the equations that were probed."""

    table: list[dict[str, object]]
    violations: tuple[Violation, ...]
    probed: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """True if no constraint is violated."""
        return not self.violations

    def raise_for_violations(self) -> None:
        """Raise SplitError listing the violations, if there are any."""
        if self.violations:
            raise SplitError("\n".join(str(v) for v in self.violations))


def fedavg_update(
    w_f: Params, trained: Sequence[Params], private: Params, summaries: Sequence[float]
) -> Params:
    """Return the example-weighted mean of the trained federated parameters (FURL eq. 4)."""
    return weighted_mean(trained, summaries)


def keep_trained(
    user: int,
    w_f: Params,
    before: Params,
    after: Params,
    trained: Sequence[Params],
    summaries: Sequence[float],
) -> Params:
    """Return the user's locally trained private values (FURL eq. 7, z = 1)."""
    return {name: table[user] for name, table in after.items()}


def joint_from_loss(net: Net, loss: Callable[[Net, Params, Batch, Params], Tensor]) -> Joint:
    """Return the joint model of split training: the user's row is taken out, and ``loss`` sees that row alone."""

    def user_loss(federated: Params, private: Params, batch: Batch, user: int) -> Tensor:
        own = {name: table[user] for name, table in private.items()}
        return loss(net, {**federated, **own}, batch, federated)

    return Joint(user_loss, fedavg_update, keep_trained)


def check_split(
    model: nn.Module,
    split: Split,
    batches: Sequence[Batch] = (),
    *,
    loss: Callable[[Net, Params, Batch, Params], Tensor] | None = None,
    joint: Joint | None = None,
    seed: int = 0,
) -> CheckReport:
    """Check a split: statically, and by probes of FURL's equations 1, 2 and 3 where batches are given.

    Args:
        model: the module; its own values start the probes.
        split: which parameters are private.
        batches: a batch of each of at least two users; without them the check is static only.
        loss: the local loss, ``(net, params, batch, received) -> scalar``; needed for probes unless ``joint`` is given.
        joint: your own joint training step, to check losses over the whole user table or other aggregations.
        seed: seeds the private values and the perturbations.

    Returns:
        The split's table and every violation, each naming the equation and the parameter.

    Raises:
        SplitError: a pattern matches nothing, or halves are tied.
    """
    split.check(model)
    table = split.table(model)
    names = split.private_names(Net(model).initial())
    if len(batches) < 2 or not names:
        return CheckReport(table, (), ())
    if joint is None:
        if loss is None:
            raise SplitError(
                "A probe needs a loss: pass loss=..., e.g. methods.terms.cross_entropy(), or joint=...."
            )
        joint = joint_from_loss(Net(model), loss)
    probe = _Probe(model, split, batches, joint, seed)
    return CheckReport(table, (*probe.equation_1(), *probe.equation_2(), *probe.equation_3()), (1, 2, 3))


class _Probe:
    """Private values for as many users as there are batches, and one local step for each of them."""

    def __init__(
        self, model: nn.Module, split: Split, batches: Sequence[Batch], joint: Joint, seed: int
    ) -> None:
        start, self.trainable = Net(model).initial(), Net(model).trainable()
        self.joint, self.batches, self.seed = joint, batches, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.w_f = {n: self._floating(v) for n, v in split.federated(start).items()}
        self.w_p = {
            n: torch.stack(
                [v.double() + 0.1 * self._noise(v) if v.is_floating_point() else v for _ in batches]
            )
            for n, v in split.personal(start).items()
        }
        self.summaries = [float(len(next(iter(b.values())))) for b in batches]
        self.batches = [{k: self._floating(v) for k, v in b.items()} for b in batches]

    @staticmethod
    def _floating(value: Tensor) -> Tensor:
        return value.detach().double() if value.is_floating_point() else value.detach().clone()

    def _noise(self, value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=self.generator, dtype=torch.float64)

    def _shaken(self, tree: Params) -> Params:
        return {n: v + self._noise(v) if v.is_floating_point() else v for n, v in tree.items()}

    def gradients(self, user: int) -> tuple[Params, Params]:
        """Return the gradients of one user's loss for the federated parameters and for every user's private ones."""
        federated = {n: v.clone().requires_grad_(n in self.trainable) for n, v in self.w_f.items()}
        private = {n: v.clone().requires_grad_(n in self.trainable) for n, v in self.w_p.items()}
        leaves = {n: v for n, v in {**federated, **private}.items() if v.requires_grad}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + user)
            loss = self.joint.loss(federated, private, self.batches[user], user)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        found = {
            n: torch.zeros_like(v) if g is None else g
            for (n, v), g in zip(leaves.items(), grads, strict=True)
        }
        return {n: found[n] for n in federated if n in found}, {n: found[n] for n in private if n in found}

    def trained(self) -> tuple[list[Params], Params]:
        """Return u_f of every user and the private tables after one local step of each user."""
        u_f, u_p = [], clone(self.w_p)
        for user in range(len(self.batches)):
            federated, private = self.gradients(user)
            u_f.append({n: v - 0.1 * federated[n] if n in federated else v for n, v in self.w_f.items()})
            for name, grad in private.items():
                u_p[name][user] -= 0.1 * grad[user]
        return u_f, u_p

    def equation_1(self) -> list[Violation]:
        """Every other user's private gradient must be exactly zero."""
        found: dict[str, Violation] = {}
        for user in range(len(self.batches)):
            for name, grad in self.gradients(user)[1].items():
                others = grad.abs().flatten(1).amax(1) if grad.dim() > 1 else grad.abs()
                others[user] = 0
                if bool((others != 0).any()):
                    other = int(others.argmax())
                    seen = (
                        f"the loss of user {user} has a gradient of up to {float(others.max()):.3g} for the private "
                        f"values of user {other}. A penalty must be taken on each user's own values."
                    )
                    found.setdefault(name, Violation(1, name, seen))
        return list(found.values())

    def equation_2(self) -> list[Violation]:
        """The new federated parameters must not change when every private value is replaced by noise."""
        u_f, u_p = self.trained()
        update = self.joint.federated_update
        expected = update(clone(self.w_f), u_f, clone(u_p), self.summaries)
        got = update(clone(self.w_f), u_f, self._shaken(u_p), self.summaries)
        seen = "the aggregated value changes when private values are replaced by noise."
        return [Violation(2, n, seen) for n in expected if not torch.equal(expected[n], got[n])]

    def equation_3(self) -> list[Violation]:
        """A user's new private values must not change with federated or other users' private values."""
        u_f, u_p = self.trained()
        found: dict[str, Violation] = {}
        for user in range(len(self.batches)):
            expected = self.joint.private_update(
                user, clone(self.w_f), clone(self.w_p), clone(u_p), u_f, self.summaries
            )
            for what, arguments in self._perturbed(user, u_f, u_p).items():
                got = self.joint.private_update(user, *arguments, self.summaries)
                for name in expected:
                    if not torch.equal(expected[name], got[name]):
                        seen = f"the new value of user {user} changes when {what} are perturbed."
                        found.setdefault(name, Violation(3, name, seen))
        return list(found.values())

    def _perturbed(
        self, user: int, u_f: list[Params], u_p: Params
    ) -> Mapping[str, tuple[Params, Params, Params, list[Params]]]:
        def others(tables: Params) -> Params:
            out = self._shaken(tables)
            for name, table in tables.items():
                out[name][user] = table[user]
            return out

        return {
            "federated parameters": (
                self._shaken(self.w_f),
                clone(self.w_p),
                clone(u_p),
                [self._shaken(u) for u in u_f],
            ),
            "other users' private values": (clone(self.w_f), others(self.w_p), others(u_p), u_f),
        }
