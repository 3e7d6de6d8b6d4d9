"""What tables of a configuration are like."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Knows all its keys; ``"3"`` is no number, ``true`` is no 1."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Open(BaseModel):
    """A table whose further keys are the options of the thing that it names; they are checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.__pydantic_extra__ or {})
