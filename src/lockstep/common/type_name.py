"""Describes the type of a value from user code, for error messages."""

from typing import Any


def describe_type(value: Any) -> str:
    """Describe the type of a value, such as `a tuple of 2` or `an object of type Net`."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return "text"
    return "None" if value is None else f"an object of type {type(value).__name__}"
