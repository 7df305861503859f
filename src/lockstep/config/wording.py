"""What pydantic found wrong, in words that say what was expected, what was given and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config.base import Section
from lockstep.config.document import UNREADABLE, Path, Place, Problem, locate
from lockstep.config.schema import Config
from lockstep.config.write import shown
from lockstep.core.names import choices, suggestion

_EXPECTED: Final = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of key: value lines",
    "dict_type": "a mapping of key: value lines",
    "tuple_type": "a list, such as [1, 5]",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "string_pattern_mismatch": "text like {pattern}",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}


def problems(error: ValidationError, places: dict[Path, Place]) -> Iterator[Problem]:
    """Yield one problem for each thing pydantic found, except where reading the document found one."""
    for found in error.errors(include_url=False):
        if found["input"] is UNREADABLE:
            continue
        if found["type"] == "value_error":
            yield from _told(found, places)
        else:
            yield Problem(locate(places, found["loc"]), found["loc"], _text(found))


def section_at(path: Path) -> type[Section] | None:
    """Return the section that stands at `path` of the configuration; None where there is none."""
    section: type[Section] | None = Config
    for name in path:
        field = section.model_fields.get(str(name)) if section else None
        section = _section(field.annotation) if field else None
    return section


def _section(annotation: Any) -> type[Section] | None:
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, Section)), None)


def _told(found: ErrorDetails, places: dict[Path, Place]) -> Iterator[Problem]:
    """What our own validators say: a line for each problem, which may begin with the key it is about."""
    path, value = found["loc"], found["input"]
    given = "" if isinstance(value, dict) else f"; got {shown(value)}"
    section = section_at(path)
    for line in str(found["ctx"]["error"]).splitlines():
        name, colon, text = line.partition(": ")
        about = (*path, name) if colon and section and name in section.model_fields else path
        yield Problem(locate(places, about), about, f"{line if about == path else text}{given}")


def _text(found: ErrorDetails) -> str:
    match found["type"]:
        case "missing":
            return "missing; it has no default"
        case "extra_forbidden":
            return _unknown(found["loc"])
        case "literal_error":
            return _choice(found)
        case known if known in _EXPECTED:
            expected = _description(found["loc"]) or _EXPECTED[known].format(**found.get("ctx", {}))
            return f"expected {expected}; got {shown(found['input'])}"
    return f"{found['msg']}; got {shown(found['input'])}"


def _unknown(path: Path) -> str:
    section = section_at(path[:-1])
    name, valid = str(path[-1]), list(section.model_fields) if section else []
    misplaced = _misplaced(name) if len(path) == 1 else ""
    return f"unknown key{misplaced or choices(name, valid)}"


def _misplaced(name: str) -> str:
    """A top-level key that belongs below recipe, placement or run."""
    for home in Config.model_fields:
        section = section_at((home,))
        if section and name in section.model_fields:
            return f"; did you mean '{home}.{name}'? Valid: {', '.join(Config.model_fields)}"
    return ""


def _choice(found: ErrorDetails) -> str:
    names = re.findall(r"'([^']*)'", found["ctx"]["expected"])
    near = suggestion(found["input"], names) if isinstance(found["input"], str) else ""
    return f"expected one of {', '.join(names)}; got {shown(found['input'])}{near}"


def _description(path: Path) -> str | None:
    """A field's description is what its type does not say by itself."""
    section = section_at(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return field.description if field else None
