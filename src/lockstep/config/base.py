"""The base class and the value types of all configuration sections. Sections are strict and immutable."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# The maximum integer value. The sum of two such integers fits into 64 bits, and their product is a finite float.
_MAX_INT: Final = 10**12
_MAX_NAME_BYTES: Final = 255  # the longest file name that common file systems support

PositiveInt = Annotated[int, Field(ge=1, le=_MAX_INT)]
NaturalInt = Annotated[int, Field(ge=0, le=_MAX_INT)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Threads = Annotated[int, Field(ge=1, le=1024)]  # the maximum is more than any machine can use
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _check_path(text: str) -> str:
    """Raise ValueError if no file system supports the path, so that a run doesn't fail later when it writes to it."""
    longest = max(len(part.encode(errors="surrogateescape")) for part in text.split("/"))
    if longest > _MAX_NAME_BYTES:
        raise ValueError(f"has a name of {longest} bytes; use names of at most {_MAX_NAME_BYTES} bytes")
    if "\0" in text:
        raise ValueError("contains a NUL character, which is not allowed in file names; remove it")
    return text


Location = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_check_path)]


class Section(BaseModel):
    """The base class of all sections. Sections are immutable and reject unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, section: Any) -> Any:
        """Remove known keys with the value null, so that they get their defaults."""
        if not isinstance(section, dict):
            return section
        return {name: value for name, value in section.items() if value is not None or name not in cls.model_fields}


def section_to_dict(section: Section) -> dict[str, Any]:
    """Convert a section to plain dicts and lists. Keys with the value None are omitted."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    plain = {name: _to_plain(value) for name, value in fields.items() if value is not None}
    return plain | (section.model_extra or {})


def make_shorthand_validator(key: str, *kinds: type) -> BeforeValidator:
    """Return a validator that expands a bare value of one of the types `kinds` to the mapping `{key: value}`."""

    def expand(value: Any) -> Any:
        return {key: value} if isinstance(value, kinds) and not isinstance(value, bool) else value

    return BeforeValidator(expand)


BY_NAME: Final = make_shorthand_validator("name", str)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Section):
        return section_to_dict(value)
    return [_to_plain(item) for item in value] if isinstance(value, tuple) else value


def list_to_tuple(value: Any) -> Any:
    """Convert a list to a tuple. Any other value is returned unchanged."""
    return tuple(value) if isinstance(value, list) else value


# YAML has lists, but the values of a frozen section must be immutable.
Floats = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], BeforeValidator(list_to_tuple)]
PositiveFloats = Annotated[tuple[PositiveFloat, ...], BeforeValidator(list_to_tuple)]
Ints = Annotated[tuple[PositiveInt, ...], BeforeValidator(list_to_tuple)]
# Shell patterns for names, as in fnmatch: a single pattern or a list.
Patterns = Annotated[
    tuple[Name, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else list_to_tuple(value)),
    Field(description="a pattern such as layer1.*, or a list of patterns"),
]
Paths = Annotated[tuple[Annotated[str, Field(pattern=r"^[^:]+:[^:]+$")], ...], BeforeValidator(list_to_tuple)]
