"""What a user can ask for, clipping by hand, and what makes no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.privacy import Adaptive, Clipping, DifferentialPrivacy
from fedkeep.privacy.clip_and_noise import norm

GIVEN = {
    "body.w": torch.tensor([3.0, 0.0], dtype=torch.float64),
    "body.b": torch.tensor([4.0], dtype=torch.float64),
    "head": torch.tensor([0.3, 0.4], dtype=torch.float64),
    "count": torch.tensor(7),
}


def test_one_bound_for_everything_by_hand() -> None:
    """‖(3, 4, 0.3, 0.4)‖² = 25.25."""
    made, inside = Clipping((("*", 2.0),)).clipped(GIVEN)
    factor = 2 / math.sqrt(25.25)
    assert not inside
    torch.testing.assert_close(made["body.w"], GIVEN["body.w"] * factor)
    torch.testing.assert_close(made["head"], GIVEN["head"] * factor)
    assert made["count"] == 7
    same, inside = Clipping((("*", 5.1),)).clipped(GIVEN)
    assert inside
    assert same["head"] is GIVEN["head"]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_clipped_to_the_bound(kind: torch.dtype) -> None:
    """Scaled in its own type a change of 10,000 equal numbers was up to 0.4 % longer."""
    for value in torch.linspace(0.5, 3.5, 20):
        made, inside = Clipping((("*", 0.5),)).clipped({"a": torch.full((10_000,), float(value), dtype=kind)})
        assert not inside
        assert norm(made) == pytest.approx(0.5, rel=1e-12)
    single, _ = Clipping((("*", 0.5),)).clipped({"a": torch.full((9,), 7.0)})
    assert single["a"].dtype == torch.float32


def test_bounds_by_pattern_by_hand() -> None:
    """‖body‖ = 5 is cut to 1, ‖head‖ = 0.5 stays; two patterns: the noise of each is √2 z C."""
    clipping = Clipping((("body.*", 1.0), ("*", 0.75)))
    made, inside = clipping.clipped(GIVEN)
    assert not inside
    torch.testing.assert_close(made["body.w"], torch.tensor([0.6, 0.0]).double())
    torch.testing.assert_close(made["body.b"], torch.tensor([0.8]).double())
    assert made["head"] is GIVEN["head"]
    names = ["body.w", "body.b", "head"]
    assert clipping.deviations(names, 3.0) == pytest.approx(
        {"body.w": 3 * math.sqrt(2), "body.b": 3 * math.sqrt(2), "head": 3 * math.sqrt(2) * 0.75}
    )
    halved, _ = clipping.clipped(GIVEN, scale=0.5)
    assert float(halved["head"].norm()) == pytest.approx(0.375)


def test_a_client_changes_the_sum_by_at_most_one_over_z_in_units_of_the_noise() -> None:
    clipping, multiplier = Clipping((("body.*", 1.0), ("head", 0.1))), 1.7
    huge = {n: v * 1e6 for n, v in GIVEN.items() if v.is_floating_point()}
    made, _ = clipping.clipped(huge)
    deviations = clipping.deviations(list(huge), multiplier)
    size = math.sqrt(sum(float((v / deviations[n]).square().sum()) for n, v in made.items()))
    assert size == pytest.approx(1 / multiplier)


def test_the_adaptive_bound_shares_the_privacy() -> None:
    """Theorem 1 of Andrew et al.: (z_Δ⁻² + (2 σ_b)⁻²) = z⁻²."""
    asked = DifferentialPrivacy(noise=1.5, clip=0.1, adaptive=Adaptive(noise=4.0))
    assert asked.multiplier**-2 + (2 * 4.0) ** -2 == pytest.approx(1.5**-2)
    assert asked.multiplier > 1.5
    assert DifferentialPrivacy(noise=1.5, clip=0.1).multiplier == 1.5
    assert asked.release(0.25).noise == 1.5


def test_delta_must_be_below_one_over_the_number_of_clients() -> None:
    DifferentialPrivacy(noise=1, clip=1, delta=0.0099).check_clients(100)
    with pytest.raises(ConfigError, match="below 1 / N = 0.01 for N = 100 clients; got 0.01"):
        DifferentialPrivacy(noise=1, clip=1, delta=0.01).check_clients(100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": None}, "Noise without clipping protects nobody"),
        ({"noise": -1.0}, "noise must be at least 0; got -1.0."),
        ({"noise": math.inf}, "noise must be finite; got inf."),
        ({"clip": 0.0}, "clip wants a positive number for '*'; got 0.0."),
        ({"clip": {}}, "clip wants a number, or at least one pattern with a bound."),
        ({"clip": {"a": math.nan}}, "clip wants a positive number for 'a'; got nan."),
        ({"delta": 0.0}, "delta must be in (0, 1); got 0.0."),
        ({"delta": 1.0}, "delta must be in (0, 1); got 1.0."),
        ({"budget": 0.0}, "budget must be positive; got 0.0."),
        ({"heaviest": -3.0}, "heaviest must be positive; got -3.0."),
        ({"noise": 0.0, "budget": 4.0}, "A budget of ε = 4 wants noise; without any, one round costs all."),
        ({"accountant": "moments"}, "accountant must be 'pld' or 'rdp'; got 'moments'."),
        (
            {"unit": "example"},
            "unit must be 'client'; got 'example'. An ε for single examples would be wrong",
        ),
        ({"clip": {"*": 1.0}, "adaptive": Adaptive(noise=9.0)}, "Adaptive clipping moves one bound"),
        ({"noise": 0.0, "adaptive": Adaptive(noise=9.0)}, "Adaptive clipping wants noise on the changes too"),
        (
            {"adaptive": Adaptive(noise=0.5)},
            "adaptive.noise must be more than half of noise = 1, as both share",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        DifferentialPrivacy(**{"noise": 1.0, "clip": 1.0, **options})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            "Adaptive clipping wants noise of its own: how many clients are within the bound is private too.",
        ),
        ({"noise": 0.0}, "Adaptive clipping wants noise of its own"),
        ({"noise": 1.0, "quantile": 1.0}, "adaptive.quantile must be in (0, 1); got 1.0."),
        ({"noise": 1.0, "rate": 0.0}, "adaptive.rate must be positive; got 0.0."),
    ],
)
def test_adaptive_clipping_that_makes_no_sense_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Adaptive(**options)
    assert str(error.value).startswith(message)


def test_patterns_must_cover_what_leaves_and_match_something() -> None:
    with pytest.raises(ConfigError, match="No pattern of clip matches 'head', which leaves the clients"):
        Clipping((("body.*", 1.0),)).clipped(GIVEN)
    with pytest.raises(ConfigError, match="'heat' of clip matches nothing .*Did you mean 'head'?"):
        Clipping((("heat", 1.0), ("*", 1.0))).groups(["head", "body.w"])
