"""Validates the options of a dataset, whose names and types are defined by a frozen dataclass."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lockstep.common.names import format_choices

T = TypeVar("T")

_MAX_COUNT: Final = 10**12
_STRICT: Final = ConfigDict(strict=True)

Count = Annotated[int, Field(ge=1, le=_MAX_COUNT, description="an integer of at least 1")]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a fraction of at least 0 and less than 1, such as 0.1")]
Text = Annotated[str, Field(max_length=4000, description="a string")]
Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(description="a list of names")]


@dataclass(frozen=True)
class NoOptions:
    """The options of a dataset without options."""


def find_option_errors(options_class: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each option in `values` that is invalid for the dataclass `options_class`."""
    valid = {field.name: field for field in fields(options_class)}
    for name, value in values.items():
        if not valid:
            yield f"options.{name}: this dataset has no options; remove it"
        elif name not in valid:
            yield f"options.{name}: unknown option{format_choices(name, valid)}"
        elif value is not None and (expectation := _describe_expected(options_class, name, value)):
            yield f"options.{name}: {expectation}, got {value!r}"
    for name, field in valid.items():
        if field.default is MISSING and values.get(name) is None:
            yield f"options.{name}: missing; set it, since it has no default"


def build_options(options_class: type[T], values: Mapping[str, Any]) -> T:
    """Create an instance of `options_class` from `values`. Options that are null get their defaults.

    Call `find_option_errors` first, because the values aren't validated here.
    """
    return options_class(**{name: value for name, value in values.items() if value is not None})


def _describe_expected(options_class: type, name: str, value: Any) -> str:
    """Return a description of the values that an option accepts, or an empty string if `value` is valid."""
    annotation = get_type_hints(options_class, include_extras=True)[name]
    try:
        TypeAdapter(annotation, config=_STRICT).validate_python(value)
    except ValidationError as error:
        return f"expected {_describe_annotation(annotation) or error.errors()[0]['msg']}"
    return ""


def _describe_annotation(annotation: Any) -> str:
    """Return the description of a type annotation: its `Field` description, or its alternatives."""
    if annotation is bool:
        return "true or false"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if descriptions := [argument.description for argument in get_args(annotation) if isinstance(argument, FieldInfo)]:
        return str(descriptions[0])
    return " or ".join(filter(None, map(_describe_annotation, get_args(annotation))))
