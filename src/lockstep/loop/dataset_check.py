"""What is looked at of a dataset before a loop of the user's own trains on it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.data.items import Items, generators_kept
from lockstep.loop.member import Member
from lockstep.probe.probe import items_of_a_loop
from lockstep.training.sample_digest import digest_ends


class DatasetFault(NamedTuple):
    """What gives another sample when it is asked for again, and how that shows."""

    culprit: str
    text: str


class DatasetCheck(NamedTuple):
    """The digest of the first and the last sample, and the faults of the dataset."""

    ends: str
    faults: Sequence[DatasetFault]


def warn_of_set_epoch(member: Member, dataset: Any) -> None:
    """Warn of a dataset that expects to be told the epoch before its samples are fetched."""
    if callable(getattr(dataset, "set_epoch", None)):
        member.rank.warn(
            "run.steps: the dataset has set_epoch: samples are fetched before the loop calls it, and by "
            "placement.workers in other processes; draw what changes in __getitem__"
        )


def check_dataset(member: Member, dataset: Any, items: Items) -> DatasetCheck:
    """Fetch the ends of a dataset, and look for faults if a run begins."""
    with generators_kept():  # fetched by one rank alone too: a dataset may count how often it is asked
        # First, since a dataset may keep what it gave.
        looks = member.checkpoint is None and not items.in_memory
        found = items_of_a_loop(items, type(dataset).__getitem__) if looks else []
        return DatasetCheck(digest_ends(items), [DatasetFault(each.culprit, each.text) for each in found])
