"""What torch raises when a rank goes away gets a name, in one line."""

import pytest
import torch.distributed as dist

from lockstep.comm.peer_errors import PeerLostError, find_peer_error, translate_peer_errors
from lockstep.errors import EXIT_FAILED, TrainingError, UsageError


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (RuntimeError("Connection closed by peer\n[trace]\n[more]"), "(Connection closed by peer)"),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_an_error_of_torch_gets_a_name(raised: RuntimeError, text: str) -> None:
    with pytest.raises(PeerLostError) as caught, translate_peer_errors():
        raise raised
    assert str(caught.value) == f"lost another rank during a collective {text}"
    assert caught.value.__cause__ is raised
    assert isinstance(caught.value, TrainingError)
    assert caught.value.exit_code == EXIT_FAILED


def test_an_exchange_that_times_out_names_the_key() -> None:
    with pytest.raises(PeerLostError) as caught, translate_peer_errors():
        raise RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete")
    assert str(caught.value).endswith("a collective times out after placement.timeout_s")


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:32182."


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """Return the error with a cause, as `raise ... from` leaves it."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError(f"{GLOO}\nmore"), f"lost another rank during a collective ({GLOO})"),
        (dist.DistBackendError("NCCL error"), "lost another rank during a collective (NCCL error)"),
        (dist.DistStoreError("timeout"), "lost another rank during a collective (timeout)"),
        (PeerLostError("gone"), "gone"),
        (raised(ValueError("in a loss"), RuntimeError(GLOO)), f"lost another rank during a collective ({GLOO})"),
        (raised(UsageError("port in use"), dist.DistNetworkError("EADDRINUSE")), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (KeyError("a mistake of ours"), None),
        (RuntimeError("[enforce fail at /gloo/transport/tcp/device.cc:33] rv != -1. Too many open files"), None),
    ],
)
def test_a_lost_peer_is_known_wherever_torch_was_in_an_exchange(error: BaseException, text: str | None) -> None:
    found = find_peer_error(error)
    assert (None if found is None else str(found)) == text


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), translate_peer_errors():
        raise KeyError("a mistake of ours")


def test_a_loader_process_that_was_killed_is_no_lost_peer() -> None:
    """torch raises it in the main thread wherever that is: mostly in an exchange."""
    with pytest.raises(RuntimeError, match="killed by signal"), translate_peer_errors():
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. ")
