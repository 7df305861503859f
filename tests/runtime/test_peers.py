"""What torch raises when a rank goes away gets a name, in one line."""

import pytest

from lockstep.errors import EXIT_FAILED, TrainingError
from lockstep.runtime.peers import PeerLostError, naming_lost_peers


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (RuntimeError("Connection closed by peer\n[trace]\n[more]"), "(Connection closed by peer)"),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_an_error_of_torch_gets_a_name(raised: RuntimeError, text: str) -> None:
    with pytest.raises(PeerLostError) as caught, naming_lost_peers():
        raise raised
    assert str(caught.value) == f"lost another rank during an exchange {text}"
    assert caught.value.__cause__ is raised
    assert isinstance(caught.value, TrainingError)
    assert caught.value.exit_code == EXIT_FAILED


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), naming_lost_peers():
        raise KeyError("a mistake of ours")


def test_a_loader_process_that_was_killed_is_no_lost_peer() -> None:
    """torch raises it in the main thread wherever that is: mostly in an exchange."""
    with pytest.raises(RuntimeError, match="killed by signal"), naming_lost_peers():
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. ")
