"""The split-constraint checker: does training with this split equal training one joint model?

Source: FURL, §3.1–3.3; ``probe`` says what is compared, and at which values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from fedkeep.core.describe import check_kind
from fedkeep.core.errors import SplitError
from fedkeep.core.modes import with_gradients
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.split.can_move import immovable
from fedkeep.split.holding import Held
from fedkeep.split.joint import Joint, LocalLoss, joint_from_loss
from fedkeep.split.probe import Probe, Violation
from fedkeep.split.split import Split


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What the checker found.

    Attributes:
        table: the split's, a row for every parameter and buffer.
        violations: broken constraints.
        probed: the equations that were probed.
        immovable: parameters that are to be trained and cannot move from where they start.
    """

    table: list[dict[str, object]]
    violations: tuple[Violation, ...] = ()
    probed: tuple[int, ...] = ()
    immovable: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no constraint is violated."""
        return not self.violations

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence about what cannot move, if there is any."""
        return (stuck(self.immovable),) if self.immovable else ()


def stuck(names: Sequence[str]) -> str:
    """Say that parameters cannot move, and what to do."""
    return (
        f"To be trained, but unable to move: {', '.join(names)}. Their gradient is exactly zero at the start and after "
        f"some steps. Let private values start elsewhere (private_init='model' takes the module's own), let the loss "
        f"reach them, or freeze them."
    )


@with_gradients
def check_split(
    model: nn.Module,
    split: Split,
    batches: Sequence[Batch] = (),
    *,
    loss: LocalLoss | None = None,
    joint: Joint | None = None,
    seed: int = 0,
    start: Params | None = None,
    trains: Collection[str] | None = None,
) -> CheckReport:
    """Check a split: statically, and by probes of FURL's equations 1, 2 and 3 where batches are given.

    Losses, gradients, updates and what a forward pass in training mode leaves in buffers are compared while private
    values are replaced, at 11 points of 6 magnitudes (0 to 1000 times normal noise, with either sign), and after
    another user was trained in the same process. Bits are compared, so a dependence by rounding alone counts too. Found
    is what shows at one of the points. Not found is what takes effect only elsewhere: at other batches, at private
    values in a region that none of the points meets, through private whole numbers, after many steps, in evaluation,
    or in another process. A check that finds nothing is therefore no proof.

    Args:
        model: the module; it is left as it was.
        split: which parameters are private, and which are frozen.
        batches: a batch of each of at least two users; without them the check is static only. Floating columns take the
            model's type, as in training.
        loss: the local loss, ``(net, params, batch, received) -> scalar``; needed for probes unless ``joint`` is given.
        joint: your own joint training step, to check losses over the whole user table or other aggregations.
        seed: seeds the private values and the perturbations.
        start: all values to begin with; None: the module's own.
        trains: the parameters that ``loss`` is to train, and which must be able to move; None: all that aren't frozen;
            empty: that is not looked at, e.g. as the loss is one of several phases' (``immovable`` takes them all).

    Returns:
        The split's table; every violation, each naming the equation and the parameter; and what cannot move.

    Raises:
        ConfigError: the model is no module, or the split no ``Split``.
        SplitError: a pattern matches nothing, or halves are tied.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    check_kind("split", split, Split, "a split, e.g. fedkeep.Split(['head.*'])")
    table, halves, net = split.table(model), split.halves(model), Net(model)
    equations = len(batches) > 1 and bool(halves.private_names)
    if joint is None and loss is not None:
        joint = joint_from_loss(net, loss)
    if joint is None and equations:
        raise SplitError(
            "A probe needs a loss: pass loss=..., e.g. methods.terms.cross_entropy(), or joint=...."
        )
    begin = net.initial() if start is None else start
    batches = [
        {n: v.to(net.float_type) if v.is_floating_point() else v for n, v in each.items()} for each in batches
    ]
    violations: tuple[Violation, ...] = ()
    stays: tuple[str, ...] = ()
    with Held(model) as held:
        if joint is not None and equations:
            violations = Probe(halves, begin, batches, joint, held, seed).violations()
        if loss is not None and batches:
            names = halves.trainable if trains is None else trains
            stays = immovable(net, halves, begin, batches, [(loss, names)], seed=seed)
    probed = (1, 2, 3) if equations else ()
    return CheckReport(table=table, violations=violations, probed=probed, immovable=stays)
