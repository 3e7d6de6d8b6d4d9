"""Property tests with hostile inputs: a few examples in every run of the suite, as many as there is time in ``make fuzz``."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile(
    "fuzz",
    max_examples=500,
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
