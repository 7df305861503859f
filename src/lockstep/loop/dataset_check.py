"""Checks of a dataset before a custom loop trains on it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.data.items import Items, generators_kept
from lockstep.loop.member import Member
from lockstep.probe.probe import items_of_a_loop
from lockstep.training.sample_digest import digest_ends


class DatasetFault(NamedTuple):
    """The part of a dataset that returns a different sample when it is asked again, and how the difference shows."""

    culprit: str
    text: str


class DatasetCheck(NamedTuple):
    """The digest of the first and last sample, and the faults of the dataset."""

    ends: str
    faults: Sequence[DatasetFault]


def warn_of_set_epoch(member: Member, dataset: Any) -> None:
    """Warn if the dataset has `set_epoch`, which the loop would call after samples were fetched."""
    if callable(getattr(dataset, "set_epoch", None)):
        member.rank.warn(
            "run.steps: the dataset has set_epoch, but samples are fetched before the loop calls it, and in other "
            "processes with placement.workers; draw random changes in __getitem__ instead"
        )


def check_dataset(member: Member, dataset: Any, items: Items) -> DatasetCheck:
    """Fetch the first and last sample of a dataset, and look for faults if the run is new."""
    with generators_kept():  # a single rank fetches them, too, since a dataset may count its calls
        # Look for faults first, since a dataset may cache the samples that it returned.
        is_examined = member.checkpoint is None and not items.in_memory
        findings = items_of_a_loop(items, type(dataset).__getitem__) if is_examined else []
        return DatasetCheck(digest_ends(items), [DatasetFault(finding.culprit, finding.text) for finding in findings])
