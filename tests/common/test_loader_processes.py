"""What torch says of a loader process that died, wherever its handler raises it, becomes one message."""

import pytest

from lockstep.common.loader_processes import find_loader_error, make_loader_error
from lockstep.errors import UserCodeError

WORKER = "DataLoader worker (pid 17)"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{WORKER} is killed by signal: Killed. ", "17 was killed by SIGKILL; probably out of memory"),
        (
            f"{WORKER} is killed by signal: Bus error. It is possible",
            "17 was killed by SIGBUS; /dev/shm is probably full",
        ),
        (
            f"{WORKER} is killed by signal: Segmentation fault. ",
            "17 was killed by SIGSEGV; the dataset code or a library",
        ),
        (
            f"{WORKER} exited unexpectedly with exit code 3. Details",
            "17 exited with code 3; the dataset code or a library",
        ),
        ("DataLoader worker (pid(s) 17, 18) exited unexpectedly", "17 exited; the dataset code or a library"),
    ],
)
def test_the_process_its_end_and_the_way_out_are_named(text: str, told: str) -> None:
    found = find_loader_error(RuntimeError(text))
    assert found is not None
    assert str(found).startswith(f"loader process {told}")


def test_it_is_found_behind_what_the_users_code_is_said_to_have_raised() -> None:
    error = UserCodeError("model my.nets:net: RuntimeError: DataLoader worker ...")
    error.__cause__ = RuntimeError(f"{WORKER} is killed by signal: Killed. ")
    assert "SIGKILL" in str(find_loader_error(error))


def test_what_names_the_process_by_number_is_taken_first() -> None:
    error = RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")
    error.__context__ = make_loader_error("1 of 2 (pid 17)", -9)
    assert find_loader_error(error) is error.__context__


def test_any_other_error_is_none_of_a_loader_process() -> None:
    assert find_loader_error(RuntimeError("DataLoader worker")) is None
    assert find_loader_error(ValueError(f"{WORKER} is killed by signal: Killed. ")) is None
