"""Compares the messages that ranks recorded in an audit, and creates errors that name faulty ranks and links."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.core.order import Step
from lockstep.errors import CorruptionError

MAX_SHOWN_NAMES: Final = 3  # maximum number of tensor names in an error
_NOT_APPLIED: Final = "The step was neither applied nor saved."
_RESUME: Final = "start again with the same run folder to resume from the last checkpoint"
REMOVE_HOST: Final = f"{_NOT_APPLIED} Remove the host, and {_RESUME}"
USE_OTHER_HOSTS: Final = (
    f"{_NOT_APPLIED} If `lockstep verify` finds no fault in the recipe, use different hosts, and {_RESUME}"
)


def format_ranks(ranks: Sequence[int], reports: Sequence[dict[str, Any]]) -> str:
    """Format ranks with their hosts, e.g. "ranks 1 (host-a), 2 (host-b)". `reports` contains the host of each rank."""
    names = ", ".join(f"{rank} ({reports[rank]['host']})" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def find_changed_link(
    sent: Sequence[Mapping[int, Any]], received: Sequence[Mapping[int, Any]]
) -> tuple[int, int] | None:
    """Return the (sender, receiver) ranks of a message that changed in transit, or None if no message changed.

    Both arguments are indexed by rank. `sent[rank]` maps each peer to a digest of the messages that `rank` sent to it,
    and `received[rank]` maps each peer to a digest of the messages that `rank` received from it.
    """
    links = ((rank, peer) for rank, digest_by_peer in enumerate(sent) for peer in digest_by_peer)
    return next((link for link in links if sent[link[0]][link[1]] != received[link[1]].get(link[0])), None)


def make_link_error(step: Step, sender: int, receiver: int, reports: Sequence[dict[str, Any]]) -> CorruptionError:
    """Return the error for a message that changed between two ranks. `reports` contains the host of each rank."""
    return CorruptionError(
        f"audit at step {step.number + 1}: {format_ranks([receiver], reports)} received a different message "
        f"than {format_ranks([sender], reports)} sent. {_NOT_APPLIED} Check the link between them, and {_RESUME}"
    )
