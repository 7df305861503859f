"""What every part of the configuration shares: strict types, no unknown keys, no change after loading."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A mapping of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# YAML has lists; a frozen section keeps tuples.
Floats = Annotated[tuple[float, ...], BeforeValidator(_listed)]
Ints = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed)]
