"""How the ranks of an audit compare what they found, and the words for whom they name."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lockstep.core.order import Step
from lockstep.errors import CorruptionError

SHOWN: Final = 3  # names of what differs
_NOT_APPLIED: Final = "The step was not applied and nothing of it was saved."
_RESUME: Final = "start again with the same run.dir: the run resumes from its last checkpoint"
TAKE_OUT: Final = f"{_NOT_APPLIED} Take the host out; {_RESUME}"
OTHER_HOSTS: Final = f"{_NOT_APPLIED} If `lockstep verify` finds no fault in the recipe, use other hosts; {_RESUME}"


def name_ranks(ranks: Sequence[int], told: Sequence[dict[str, Any]]) -> str:
    """Return what a person calls them; each rank has told its host."""
    listed = ", ".join(f"{rank} ({told[rank]['host']})" for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def changed_on_the_way(
    sent: Sequence[Mapping[int, Any]], received: Sequence[Mapping[int, Any]]
) -> tuple[int, int] | None:
    """Return sender and receiver of a message that did not arrive as it was sent; by rank, each has noted by peer."""
    links = ((rank, peer) for rank, noted in enumerate(sent) for peer in noted)
    return next((link for link in links if sent[link[0]][link[1]] != received[link[1]].get(link[0])), None)


def link_verdict(step: Step, sender: int, receiver: int, told: Sequence[dict[str, Any]]) -> CorruptionError:
    """Return the error of a link that changes messages; each rank has `told` its host."""
    return CorruptionError(
        f"audit at step {step.number + 1}: what {name_ranks([sender], told)} sent is not what "
        f"{name_ranks([receiver], told)} received. {_NOT_APPLIED} Have the link between them looked at; {_RESUME}"
    )
