"""Tables for reductions that stand faulty clients, and for secure sums."""

from __future__ import annotations

from typing import Any

import pytest

from fedkeep import WeightedMean
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.experiments.build import build_method, run_config
from fedkeep.methods import ClippedMean, Krum, Median, SecureMean, SecureSums, TrimmedMean
from tests.experiments.configs import config


def built(**method: Any) -> Any:
    return build_method(config(method={"kind": "fedavg", **method}).method).server.reduce


def test_a_table_names_a_reduction() -> None:
    assert built(reduce={"kind": "median"}) == Median()
    assert built(reduce={"kind": "trimmed_mean", "share": 0.2}) == TrimmedMean(share=0.2)
    assert built(reduce={"kind": "krum", "faulty": 2, "taken": 3}) == Krum(faulty=2, taken=3)
    assert built(reduce={"kind": "clipped_mean", "bound": 0.5}) == ClippedMean(bound=0.5)


def test_a_table_asks_for_secure_sums_and_the_run_ends_where_it_did() -> None:
    sums = {"clip": 50.0, "bits": 64}
    wanted = SecureMean(mean=WeightedMean(by="uniform"), sums=SecureSums(clip=50.0, bits=64))
    assert built(weighting="uniform", secure=sums) == wanted
    plain, secure = (
        run_config(config(method={"kind": "furl", "weighting": "uniform", **more}), progress=False)
        for more in ({}, {"secure": sums})
    )
    for name, value in plain.server.items():
        assert float((secure.server[name] - value).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            {"reduce": {"kind": "krumm"}},
            "method.reduce.kind must be 'median', 'trimmed_mean', 'krum' or 'clipped_mean'",
        ),
        ({"reduce": {"kind": "krum", "share": 1}}, "method.reduce.share: unknown key."),
        ({"reduce": {"kind": "clipped_mean", "by": "examples"}}, "method.reduce.by: unknown key."),
        ({"reduce": {"kind": "trimmed_mean", "share": 0.7}}, "share must be in [0, 0.5)"),
        ({"reduce": {"kind": "median"}, "weighting": "uniform"}, "method.reduce: every client counts once"),
        (
            {"kind": "ifca", "clusters": 2, "reduce": {"kind": "median"}},
            "method.reduce: 'ifca' reduces uploads in a way of",
        ),
        ({"secure": {"clip": 1.0}}, "'fedavg' weights clients by their numbers of examples"),
        (
            {"secure": {"clip": 1.0}, "reduce": {"kind": "krum"}},
            "'fedavg' reduces uploads by Krum, which looks at single",
        ),
    ],
)
def test_tables_that_make_no_sense_are_refused(method: dict[str, Any], message: str) -> None:
    with pytest.raises(FedkeepError) as error:
        built(**method)
    assert str(error.value).startswith(message)


def test_a_secure_table_without_a_bound_is_refused() -> None:
    from fedkeep.experiments.config import parse_config

    text = config().to_toml() + "\n[method.secure]\nbits = 32\n"
    with pytest.raises(ConfigError, match="method.secure.clip: missing."):
        parse_config(text)
