"""Storage that ends like a killed process: after the n-th change of an object, every further operation raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lockstep.runs.storage import Storage

CHANGES = ("write", "create", "upload", "copy", "remove")


class Killed(BaseException):
    """Stands for the kill of the process, which no `except Exception` sees."""


@contextmanager
def killed_after(changes: int, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the first `changes` changes happen, then none and nothing else. Yield the list of the changes that happened.

    A rank would be gone. Here all code that runs on, such as what releases the lock, can't reach the storage either.
    """
    happened: list[str] = []
    do = Storage._do
    dead = [False]

    def counted(self: Storage, operation: str, name: str, action: Callable[[], Any]) -> Any:
        if dead[0]:
            raise Killed
        if operation not in CHANGES:
            return do(self, operation, name, action)
        if len(happened) == changes:
            dead[0] = True
            raise Killed
        result = do(self, operation, name, action)
        happened.append(f"{operation} {name}")
        return result

    with patch.context() as local:
        local.setattr(Storage, "_do", counted)
        yield happened
