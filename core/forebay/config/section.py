"""What every section of the run file is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Address = Annotated[str, Field(pattern=r"^[^\s:]+:\d{1,5}$|^\[[0-9a-fA-F:]+\]:\d{1,5}$")]


class Section(BaseModel):
    """A section of the run file: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
