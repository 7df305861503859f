"""The kind of a value that a user's code gave, in the words of errors."""

from typing import Any


def type_name(value: Any) -> str:
    """Return what errors call a value: its kind."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return "text"
    return "None" if value is None else f"an object of type {type(value).__name__}"
