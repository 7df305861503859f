"""The type of a value from user code, as text for error messages."""

from typing import Any


def type_name(value: Any) -> str:
    """Return the name of the type of a value, for error messages."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return "text"
    return "None" if value is None else f"an object of type {type(value).__name__}"
