"""Each error ends the program with its own exit code, and many problems fit on a screen."""

import pytest

from lockstep.errors import (
    ConfigError,
    LockstepError,
    PreflightError,
    TrainingError,
    UsageError,
    UserCodeError,
    VerificationError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (LockstepError, 1),
        (UsageError, 2),
        (UserCodeError, 2),
        (TrainingError, 1),
        (VerificationError, 3),
        (PreflightError, 4),
    ],
)
def test_exit_codes_and_what_the_user_reads(kind: type[LockstepError], code: int) -> None:
    assert kind.exit_code == code
    assert kind("no such folder").terminal_text == "error: no such folder"


def test_problems_of_a_configuration_are_counted() -> None:
    assert ConfigError(["a"]).terminal_text == "error: a"
    assert ConfigError(["a", "b"]).terminal_text == "error: 2 problems\na\nb"
    assert ConfigError(["a", "b"]).exit_code == 2


@pytest.mark.parametrize(("number", "last"), [(11, "problem 10"), (12, "2 more"), (1010, "1,000 more")])
def test_of_many_problems_the_text_has_the_first(number: int, last: str) -> None:
    problems = [f"problem {index}" for index in range(number)]
    error = ConfigError(problems)
    lines = str(error).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (11, "problem 0", last)
    assert error.problems == tuple(problems)
