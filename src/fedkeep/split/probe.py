"""Probes of FURL's equations 1, 2 and 3: private values are replaced, and what may not depend on them is compared.

Source: FURL, §3.1–3.3. A split is sound if (1) a user's loss does not depend on another user's private parameters,
(2) the federated update does not depend on private parameters, and (3) a user's private update depends on nothing
but that user's private values and the users' summaries.

Everything is computed at 11 points: the start, and start ± s · noise for s of ``SCALES``, with normal noise of its own
for every user. Federated values are the start's, and start + min(s, 1) · noise at every point with +. So what is used
only in a region of values (a hinge, a comparison) has a chance to be met. A joint step is probed for every user at
every point; a loss that is given a user's own rows alone, for every user at the first point, then in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import SplitError
from fedkeep.core.params import Batch, Params, clone
from fedkeep.core.seeds import forked, generator, seed_all
from fedkeep.split.halves import Halves, frozen_changed
from fedkeep.split.holding import Held
from fedkeep.split.joint import Joint

SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)
POINTS = 1 + 2 * len(SCALES)
EQUATIONS = {
    1: "independent local training: ∂L(user i)/∂w_p(user j) = 0",
    2: "federated update: a_f(w_f, u_f of all users, summaries)",
    3: "private update: a_p(w_p, u_p of the same user, summaries)",
}
STEP = 0.1


@dataclass(frozen=True)
class Violation:
    """A broken constraint.

    Attributes:
        equation: its number (FURL eq. 1–3); None: a frozen tensor was changed.
        parameter: the parameter or buffer.
        seen: what was seen.
    """

    equation: int | None
    parameter: str
    seen: str

    def __str__(self) -> str:
        if self.equation is None:
            return f"The frozen half is violated by {self.parameter!r}: {self.seen}"
        return f"Equation ({self.equation}) is violated by {self.parameter!r} ({EQUATIONS[self.equation]}): {self.seen}"


@dataclass(frozen=True)
class ProbePoint:
    """Values to probe at: federated and frozen ones, and private tables of shape (users, *shape)."""

    shared: Params
    private: Params


@dataclass
class ProbeStep:
    """What one user's training step gives.

    Attributes:
        loss: a scalar.
        gradients: of the loss, by name, for what the step trains; of private tables for all users.
        shared: federated and frozen values after the forward pass, which changes buffers.
        private: private tables after the forward pass.
    """

    loss: Tensor
    gradients: Params
    shared: Params
    private: Params

    def seen(self, user: int) -> Iterator[tuple[str, Tensor]]:
        """Yield all of it in words, of private tables the user's row."""
        yield "the loss", self.loss
        for name, slope in self.gradients.items():
            yield f"the gradient for {name!r}", slope[user] if name in self.private else slope
        for name, value in self.shared.items():
            yield f"the new value of {name!r}", value
        for name, table in self.private.items():
            yield f"the new value of {name!r}", table[user]

    def trained(self, name: str, value: Tensor) -> Tensor:
        """Return a value after a step of plain gradient descent."""
        return value - STEP * self.gradients[name] if name in self.gradients else value


class Probe:
    """Compares training steps of as many users as there are batches.

    Args:
        halves: of the module.
        start: all values.
        batches: a batch of each user.
        joint: the training step.
        held: the module, held still.
        seed: seeds the noise.
    """

    def __init__(
        self, halves: Halves, start: Params, batches: Sequence[Batch], joint: Joint, held: Held, seed: int
    ) -> None:
        self.halves, self.start, self.batches, self.joint, self.held = halves, start, batches, joint, held
        self.seed, self.users = seed, len(batches)
        self.summaries = [float(len(next(iter(b.values())))) for b in batches]
        self.found: dict[tuple[int | None, str], Violation] = {}

    def violations(self) -> tuple[Violation, ...]:
        """Probe everything at every point; return what was found, by equation.

        Raises:
            SplitError: the same step has another result when it is taken again.
        """
        self.repeatable()
        there = self.point(0)
        for number in range(POINTS):
            here, there = there, self.point((number + 1) % POINTS)
            turn = number % self.users
            users = [turn] if self.joint.own_rows and number else list(range(self.users))
            steps = {user: self.step(here, user) for user in users}
            if not self.joint.own_rows:
                self.others(here, there, steps)
            self.remembered(here, there, steps[turn], turn)
            self.filled(here, there, steps)
            if len(steps) == self.users:
                self.updates(here, there, list(steps.values()))
        order = {1: 1, 2: 2, 3: 3, None: 4}
        return tuple(sorted(self.found.values(), key=lambda v: order[v.equation]))

    def point(self, number: int) -> ProbePoint:
        """Return a point to probe at; the last one is the start."""
        shared = {**self.halves.frozen(self.start), **self.halves.federated(self.start)}
        private = {n: torch.stack([v] * self.users) for n, v in self.halves.private(self.start).items()}
        if number == POINTS - 1:
            return ProbePoint(shared, private)
        scale, sign = SCALES[number // 2], -1 if number % 2 else 1
        draw = generator(self.seed, "probe", round=number // 2)
        private = {n: self._moved(n, v, sign * scale, draw) for n, v in private.items()}
        if sign > 0:
            federated = self.halves.federated(self.start)
            shared |= {n: self._moved(n, v, min(scale, 1), draw) for n, v in federated.items()}
        return ProbePoint(shared, private)

    def _moved(self, name: str, value: Tensor, scale: float, draw: torch.Generator) -> Tensor:
        if not value.is_floating_point():
            return value
        moved = value + scale * torch.randn(value.shape, generator=draw, dtype=value.dtype).to(value.device)
        if name not in self.halves.trainable and bool((value >= 0).all()):
            return moved.abs()  # a variance stays one
        return moved

    def step(self, point: ProbePoint, user: int, *, gradients: bool = True, anew: bool = True) -> ProbeStep:
        """Return one user's step; ``anew``: with the module's attributes as they were at the start."""
        if anew:
            self.held.anew()
        values = {n: v.clone() for n, v in {**point.shared, **point.private}.items()}
        leaves = {
            n: v.requires_grad_() for n, v in values.items() if gradients and n in self.halves.trainable
        }
        shared, private = ({n: values[n] for n in tree} for tree in (point.shared, point.private))
        device = next((str(v.device) for v in values.values()), "cpu")
        with forked(device), torch.set_grad_enabled(gradients):
            seed_all(self.seed + user, device)
            loss = self.joint.loss(shared, private, self.batches[user], user)
        slopes = {n: torch.zeros_like(v) for n, v in leaves.items()}
        if leaves and loss.requires_grad:
            found = torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
            slopes = dict(zip(leaves, found, strict=True))
        return ProbeStep(loss.detach(), slopes, _plain(shared), _plain(private))

    def repeatable(self) -> None:
        """Refuse a step that isn't a function of its values, once it was taken once."""
        _, first, second = (self.step(self.point(0), 0) for _ in range(3))
        if what := differs(first, second, 0):
            raise SplitError(
                "The split cannot be probed: {what} of user 0 is another when it is computed again with the "
                "same values and the same seed. Draw random numbers from torch alone, and let the loss "
                "remember nothing.",
                what=what,
            )

    def others(self, here: ProbePoint, there: ProbePoint, steps: Mapping[int, ProbeStep]) -> None:
        """Equation 1: neither loss nor step of a user may depend on other users' private values."""
        for user, step in steps.items():
            for name, table in here.private.items():
                self._slopes(name, step, user)
                for other in range(self.users):
                    if other != user and not same(step.private[name][other], table[other]):
                        self._add(3, name, f"training user {user} changes the values of user {other}.")

            def replaced(names: Sequence[str], user: int = user) -> ProbeStep:
                return self.step(ProbePoint(here.shared, _rows(here, there, names, user, own=False)), user)

            self._blame(step, replaced, user, "changes when other users' private values are replaced.")

    def _slopes(self, name: str, step: ProbeStep, user: int) -> None:
        slope = step.gradients.get(name)
        if slope is None or not slope.numel():
            return
        size = slope.abs().reshape(self.users, -1).amax(1)
        size[user] = 0
        if bool((size != 0).any()):
            self._add(
                1,
                name,
                (
                    f"the loss of user {user} has a gradient of up to {float(size.max()):.3g} for the private "
                    f"values of user {int(size.argmax())}. A penalty must be taken on each user's own values."
                ),
            )

    def remembered(self, here: ProbePoint, there: ProbePoint, step: ProbeStep, user: int) -> None:
        """Equation 1: a step may not depend on the private values of a user who was trained before, in one process."""
        before = (user + 1) % self.users

        def after(names: Sequence[str]) -> ProbeStep:
            self.step(ProbePoint(here.shared, _rows(here, there, names, before, own=True)), before)
            return self.step(here, user, anew=False)

        if differs(step, after(list(here.private)), user):  # else nothing at all was remembered
            self._blame(
                after(()),
                after,
                user,
                (
                    f"changes with the private values of user {before}, who was trained before: the model or the loss "
                    f"remembers them, in an attribute or in a buffer that is not persistent."
                ),
            )

    def filled(self, here: ProbePoint, there: ProbePoint, steps: Mapping[int, ProbeStep]) -> None:
        """Equation 2: what training writes into federated and frozen tensors may not depend on private values."""
        for user, step in steps.items():
            own = ProbePoint(here.shared, _rows(here, there, list(here.private), user, own=True))
            other = self.step(own, user, gradients=False)
            for name, value in step.shared.items():
                filled = not same(value, other.shared[name])
                if filled:
                    self._add(
                        2,
                        name,
                        (
                            f"training fills it from private values: after one step of user {user} it changes when that "
                            f"user's private values are replaced, so they would leave with it. Name it private too."
                        ),
                    )
                if name in self.halves.frozen_names and not (filled or same(value, here.shared[name])):
                    self._add(None, name, frozen_changed(name))

    def updates(self, here: ProbePoint, there: ProbePoint, steps: Sequence[ProbeStep]) -> None:
        """Equations 2 and 3 for what is made of the trained values."""
        w_f = self.halves.federated(here.shared)
        u_f = [{n: s.trained(n, v) for n, v in self.halves.federated(s.shared).items()} for s in steps]
        u_p = {
            n: torch.stack([s.trained(n, s.private[n])[user] for user, s in enumerate(steps)])
            for n in here.private
        }
        expected = self.joint.federated_update(clone(w_f), u_f, clone(u_p), self.summaries)
        got = self.joint.federated_update(clone(w_f), u_f, clone(there.private), self.summaries)
        for name in expected:
            if not same(expected[name], got[name]):
                self._add(2, name, "the aggregated value changes when private values are replaced by noise.")
        moved = [_away(u) for u in u_f]
        for user in range(self.users):
            kept = self._kept(user, w_f, here.private, u_p, u_f)
            before, after = (
                _rows(ProbePoint({}, p), there, list(p), user, own=False) for p in (here.private, u_p)
            )
            for what, other in (
                ("federated parameters", self._kept(user, _away(w_f), here.private, u_p, moved)),
                ("other users' private values", self._kept(user, w_f, before, after, u_f)),
            ):
                for name in kept:
                    if not same(kept[name], other[name]):
                        self._add(3, name, f"the new value of user {user} changes when {what} are perturbed.")

    def _kept(self, user: int, w_f: Params, before: Params, after: Params, u_f: Sequence[Params]) -> Params:
        return self.joint.private_update(user, clone(w_f), clone(before), clone(after), u_f, self.summaries)

    def _blame(
        self, first: ProbeStep, again: Callable[[Sequence[str]], ProbeStep], user: int, seen: str
    ) -> None:
        """Note the private names that make ``again`` another step than ``first`` when they are replaced."""
        names = list(first.private)
        if not (what := differs(first, again(names), user)):
            return
        alone = {n: differs(first, again([n]), user) for n in names} if len(names) > 1 else {}
        guilty = {name: found for name, found in alone.items() if found} or {names[0]: what}
        for name, found in guilty.items():
            self._add(1, name, f"{found} of user {user} {seen}")

    def _add(self, equation: int | None, name: str, seen: str) -> None:
        self.found.setdefault((equation, name), Violation(equation, name, seen))


def differs(a: ProbeStep, b: ProbeStep, user: int) -> str:
    """Say what differs first in two steps of a user, or return an empty string."""
    pairs = zip(a.seen(user), b.seen(user), strict=True)
    return next((what for (what, one), (_, two) in pairs if not same(one, two)), "")


def same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal, NaN being equal to NaN."""
    if torch.equal(a, b):
        return True
    both = a.shape == b.shape and a.dtype == b.dtype and a.is_floating_point()
    return both and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _away(tree: Params) -> Params:
    """Return values that are all others, and no nearer to 0."""
    return {name: v + 1 + v.abs() if v.is_floating_point() else v for name, v in tree.items()}


def _plain(tree: Params) -> Params:
    return {name: value.detach() for name, value in tree.items()}


def _rows(here: ProbePoint, there: ProbePoint, names: Sequence[str], user: int, *, own: bool) -> Params:
    """Return ``here``'s private tables with rows of ``there`` in some of them: the user's own, or all others'."""
    tables = dict(here.private)
    for name in names:
        replaced = here.private[name].clone()
        rows = [u for u in range(len(replaced)) if (u == user) == own]
        replaced[rows] = there.private[name][rows]
        tables[name] = replaced
    return tables
