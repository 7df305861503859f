"""Compares the messages that ranks noted in an audit, and words the errors that name a rank."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.core.order import Step
from lockstep.errors import CorruptionError

SHOWN: Final = 3  # how many names of differing tensors an error lists
_NOT_APPLIED: Final = "The step was neither applied nor saved."
_RESUME: Final = "start again with the same run.dir to resume from the last checkpoint"
TAKE_OUT: Final = f"{_NOT_APPLIED} Remove the host, and {_RESUME}"
OTHER_HOSTS: Final = (
    f"{_NOT_APPLIED} If `lockstep verify` finds no fault in the recipe, use different hosts, and {_RESUME}"
)


def name_ranks(ranks: Sequence[int], told: Sequence[dict[str, Any]]) -> str:
    """Return the ranks and their hosts as text. `told` has the host of every rank."""
    listed = ", ".join(f"{rank} ({told[rank]['host']})" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def changed_on_the_way(
    sent: Sequence[Mapping[int, Any]], received: Sequence[Mapping[int, Any]]
) -> tuple[int, int] | None:
    """Return the sender and the receiver of a message that changed on the way, or None.

    `sent` and `received` are indexed by rank. Each item has the notes of that rank by peer.
    """
    links = ((rank, peer) for rank, noted in enumerate(sent) for peer in noted)
    return next((link for link in links if sent[link[0]][link[1]] != received[link[1]].get(link[0])), None)


def link_verdict(step: Step, sender: int, receiver: int, told: Sequence[dict[str, Any]]) -> CorruptionError:
    """Return the error for a link that changes messages. `told` has the host of every rank."""
    return CorruptionError(
        f"audit at step {step.number + 1}: {name_ranks([receiver], told)} received a different message "
        f"than {name_ranks([sender], told)} sent. {_NOT_APPLIED} Check the link between them, and {_RESUME}"
    )
