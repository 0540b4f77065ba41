"""What every section of the run file is made of: strict, frozen, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

AUTO: Final = "auto"
BUILT_IN: Final = "built-in"

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
AutoOrPositiveInt = Literal["auto"] | PositiveInt


class Section(BaseModel):
    """A part of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
