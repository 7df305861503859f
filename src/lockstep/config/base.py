"""What every part of the configuration shares: strict types, no unknown keys, no change after loading."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# No count of this world is larger, and what is computed of two of them still fits 64 bits and is a float.
_MOST: Final = 10**12
_LONGEST_NAME: Final = 255  # bytes

PositiveInt = Annotated[int, Field(ge=1, le=_MOST)]
NaturalInt = Annotated[int, Field(ge=0, le=_MOST)]
Name = Annotated[str, Field(min_length=1, max_length=255)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Threads = Annotated[int, Field(ge=1, le=1024)]  # more than any machine has use for
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _path(text: str) -> str:
    """Refuse what no file system has a place for, before something is half done."""
    longest = max(len(part.encode(errors="surrogateescape")) for part in text.split("/"))
    if longest > _LONGEST_NAME:
        raise ValueError(f"a name of {longest} bytes; file systems take {_LONGEST_NAME}")
    if "\0" in text:
        raise ValueError("a NUL character, which no file name can have")
    return text


Location = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_path)]


class Section(BaseModel):
    """A mapping of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Take a known key that is null for one that is left out."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name not in cls.model_fields}


def values(section: Section) -> dict[str, Any]:
    """Return what a section holds as plain mappings and lists; keys that are not set (None) are left out."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    plain = {name: _plain(value) for name, value in fields.items() if value is not None}
    return plain | (section.model_extra or {})


def shorthand(key: str, *kinds: type) -> BeforeValidator:
    """Read a bare value of one of the kinds as the section in which it is the value of `key`."""

    def expand(value: Any) -> Any:
        return {key: value} if isinstance(value, kinds) and not isinstance(value, bool) else value

    return BeforeValidator(expand)


BY_NAME: Final = shorthand("name", str)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return values(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def as_tuple(value: Any) -> Any:
    """Read a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


# YAML has lists; a frozen section keeps tuples.
Floats = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], BeforeValidator(as_tuple)]
PositiveFloats = Annotated[tuple[PositiveFloat, ...], BeforeValidator(as_tuple)]
Ints = Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple)]
# Shell patterns over names, as of fnmatch: one, or a list of them.
Patterns = Annotated[
    tuple[Name, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else as_tuple(value)),
    Field(description="a pattern such as layer1.*, or a list of them"),
]
Paths = Annotated[tuple[Annotated[str, Field(pattern=r"^[^:]+:[^:]+$")], ...], BeforeValidator(as_tuple)]
