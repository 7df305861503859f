"""Rewords the validation errors of pydantic. Each message names the expected value, the actual value, and a fix."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Final, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lockstep.common.names import find_nearest, format_choices, format_suggestion, list_names
from lockstep.config.base import Section
from lockstep.config.document import UNREADABLE, KeyProblem, Path, SourcePosition, find_position, format_key
from lockstep.config.run import IntervalConfig
from lockstep.config.schema import Config
from lockstep.config.write import format_value

_EXPECTED: Final = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of key: value lines",
    "dict_type": "a mapping of key: value lines",
    "tuple_type": "a list, such as [1, 5]",
    "string_too_short": "text that is not empty",
    "string_too_long": "at most {max_length} characters",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
}
_TYPO_SIMILARITY: Final = 0.8  # minimum similarity to a valid key at which an unknown key is considered a typo
_MISSING: Final = "missing; it has no default"
_UNKNOWN: Final = "unknown key"
_COMMA_ADVICE: Final = "write numbers with a decimal point, as in 0.1, not with a comma"
# Patterns that match quoted values that would have the expected type without quotes.
_QUOTED_VALUE_PATTERNS: Final = {
    "int": r"[-+]?\d+",
    "float": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?",
    "bool": "true|false",
}


def convert_validation_error(error: ValidationError, positions: dict[Path, SourcePosition]) -> Iterator[KeyProblem]:
    """Yield a problem for each error that pydantic found, except for values that the parser has already reported."""
    for details in error.errors(include_url=False):
        if details["input"] is UNREADABLE or details["type"] == "default_factory_not_called":
            continue  # already reported by the parser, or a default that depends on an invalid value
        if details["type"] == "value_error":
            yield from _find_validator_problems(details, positions)
        else:
            yield KeyProblem(find_position(positions, details["loc"]), details["loc"], _describe_error(details))


def merge_typos(problems: Sequence[KeyProblem]) -> list[KeyProblem]:
    """Merge the problem of a missing key with that of an unknown key that misspells it or is in the wrong section."""
    missing = [problem.path for problem in problems if problem.text == _MISSING]
    merged = []
    for problem in problems:
        if problem.text.startswith(_UNKNOWN) and (intended := _find_intended_key(problem, missing)):
            missing.remove(intended)
            name = str(intended[-1]) if intended[:-1] == problem.path[:-1] else format_key(intended)
            problem = problem._replace(text=f"{_UNKNOWN}; did you mean '{name}', which is missing?")
        merged.append(problem)
    return [problem for problem in merged if problem.text != _MISSING or problem.path in missing]


def _find_intended_key(problem: KeyProblem, missing: Sequence[Path]) -> Path | None:
    """Return the missing key that an unknown key probably stands for, or None."""
    *section, name = problem.path
    names = [str(path[-1]) for path in missing if [*path[:-1]] == section]
    if similar := find_nearest(str(name), names, 1):
        return (*section, similar[0])
    return next((path for path in missing if f"'{format_key(path)}'" in problem.text), None)


def find_unknown_key(path: Path) -> tuple[Path, str] | None:
    """Return the shortest prefix of `path` that isn't a valid key, and a message, or None if `path` may be valid."""
    for depth, name in enumerate(path):
        section = get_section_class(path[:depth])
        if section is None:
            parent = get_section_class(path[: depth - 1])
            is_free_mapping = parent and get_origin(parent.model_fields[str(path[depth - 1])].annotation) is dict
            return (
                None if is_free_mapping else (path[: depth + 1], f"{_UNKNOWN}; {path[depth - 1]} has no keys below it")
            )
        if name not in section.model_fields:
            return (
                None
                if section.model_config.get("extra") == "allow"
                else (path[: depth + 1], _describe_unknown_key(path[: depth + 1]))
            )
    return None


def get_section_class(path: Path) -> type[Section] | None:
    """Return the section class of the value or the list items at `path`, or None if they aren't a section."""
    section: type[Section] | None = Config
    for name in (part for part in path if isinstance(part, str)):
        field = section.model_fields.get(str(name)) if section else None
        types = (field.annotation, *get_args(field.annotation)) if field else ()
        section = next((part for part in types if isinstance(part, type) and issubclass(part, Section)), None)
    return section


def get_field(path: Path) -> FieldInfo | None:
    """Return the field at `path`, or None if there is no such field."""
    section = get_section_class(path[:-1])
    return section.model_fields.get(str(path[-1])) if section else None


def _find_validator_problems(details: ErrorDetails, positions: dict[Path, SourcePosition]) -> Iterator[KeyProblem]:
    """Yield a problem for each line of a ValueError that a validator of Lockstep raised.

    If a line starts with a key and a colon, the problem is attributed to this key of the section.
    """
    path, value = details["loc"], details["input"]
    got = "" if isinstance(value, dict) else f"; got {format_value(value)}"
    section = get_section_class(path)
    for line in str(details["ctx"]["error"]).splitlines():
        name, colon, text = line.partition(": ")
        key_path = (*path, name) if colon and section and name in section.model_fields else path
        yield KeyProblem(find_position(positions, key_path), key_path, f"{line if key_path == path else text}{got}")


def _describe_error(details: ErrorDetails) -> str:
    match details["type"]:
        case "missing":
            return _MISSING
        case "extra_forbidden":
            return _describe_unknown_key(details["loc"])
        case "literal_error":
            names = re.findall(r"'([^']*)'", details["ctx"]["expected"])
            suggested = format_suggestion(details["input"], names) if isinstance(details["input"], str) else ""
            return f"expected one of {', '.join(names)}; got {format_value(details['input'])}{suggested}"
        case known if known in _EXPECTED:
            field = get_field(details["loc"])  # the description of a field takes precedence over its type
            expected = (field and field.description) or _EXPECTED[known].format(**_get_limits(details))
            return f"expected {expected}; got {format_value(details['input'])}{_suggest_fix(details)}"
    return f"{details['msg']}; got {format_value(details['input'])}"


def _suggest_fix(details: ErrorDetails) -> str:
    """Suggest a fix for a quoted number, a decimal comma, or a number instead of an interval.

    Returns an empty string for any other error.
    """
    if type(details["input"]) is int and get_section_class(details["loc"]) is IntervalConfig:
        keys = [f"{format_key((*details['loc'], name))}={details['input']}" for name in IntervalConfig.model_fields]
        return f"; set {' or '.join(keys)}"
    text, kind = details["input"], details["type"].partition("_")[0]
    if not isinstance(text, str) or kind not in _QUOTED_VALUE_PATTERNS:
        return ""
    if kind == "float" and re.fullmatch(r"[-+]?\d+,\d+", text):
        return f"; {_COMMA_ADVICE}"
    return "; remove the quotes" if re.fullmatch(_QUOTED_VALUE_PATTERNS[kind], text) else ""


def find_key(name: str) -> str:
    """Return the least nested dotted key that ends with `name`, or an empty string if there is no such key."""
    keys = [key for key in _iterate_keys() if key[-1] == name]
    return format_key(min(keys, key=len)) if keys else ""


def _get_limits(details: ErrorDetails) -> dict[str, Any]:
    """Return the limits of a constraint, formatted for a message. Floats are rounded, and integers keep all digits."""
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in details.get("ctx", {}).items()}


def _describe_unknown_key(path: Path) -> str:
    section = get_section_class(path[:-1])
    name, valid_names = str(path[-1]), list(section.model_fields) if section else []
    if name.isdecimal():  # for example, YAML parses {lr: 0,1} as the keys `lr` and `1`
        return f"{_UNKNOWN}; {_COMMA_ADVICE}"
    # Don't suggest keys of nested sections if the section has options, because the name is more likely an option. For
    # example, `dropout` in `recipe.model` is an option of the model, and not `recipe.model.lora.dropout`.
    own_path = path[:-1] if "options" in valid_names else ()
    if same_name := [
        key for key in _iterate_keys() if key[-1] == name and not (own_path and key[: len(own_path)] == own_path)
    ]:
        return f"{_UNKNOWN}; did you mean '{format_key(min(same_name, key=len))}'?{list_names(valid_names)}"
    if "options" in valid_names and not get_close_matches(name, valid_names, cutoff=_TYPO_SIMILARITY):
        suggested = "' or '".join([*find_nearest(name, valid_names, 1), f"{format_key(path[:-1])}.options.{name}"])
        return f"{_UNKNOWN}; did you mean '{suggested}'?{list_names(valid_names)}"
    return f"{_UNKNOWN}{format_choices(name, valid_names)}"


def _iterate_keys(path: Path = ()) -> Iterator[Path]:
    section = get_section_class(path)
    for name in section.model_fields if section else ():
        yield (*path, name)
        yield from _iterate_keys((*path, name))
