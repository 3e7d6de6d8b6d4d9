"""The settings of a project's server app (``tool.flwr.app.config``, ``--run-config``), checked before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedkeep.experiments.config_tables import made_of
from fedkeep.flower.transport import LIMIT
from fedkeep.remote.server import Only

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class Settings(BaseModel):
    """What ``new_project`` writes there, which says what each is; ``"3"`` is no number, ``"false"`` is no ``false``."""

    model_config = ConfigDict(frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-"))

    config: Text
    out: Text
    status: str
    clients: Count
    limit: Annotated[int, Field(ge=0, le=LIMIT)]
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    only: Only
    keep_rounds: Count
    continue_from: str
    on_change: str

    @property
    def run(self) -> Path:
        """The folder of the server's run."""
        return Path(self.out)


def settings_of(given: Mapping[str, Any]) -> Settings:
    """Return the settings that Flower gives the server app.

    Raises:
        ConfigError: one is missing, or its value doesn't fit; all faults are named.
    """
    where = "The settings of the server app (tool.flwr.app.config, --run-config)"
    found: Settings = made_of(Settings, given, where)
    return found
