"""Checks the dataset of a custom loop before training."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.data.items import Items, preserve_generators
from lockstep.loop.member import Member
from lockstep.probe.probe import check_loop_dataset
from lockstep.training.sample_digest import digest_ends


class DatasetFault(NamedTuple):
    """Code of a dataset that doesn't return the same sample twice (`culprit`), and a description of the problem."""

    culprit: str
    text: str


class DatasetCheck(NamedTuple):
    """The digest of the first and last sample of a dataset, and the faults that were found in the dataset."""

    ends_digest: str
    faults: Sequence[DatasetFault]


def warn_about_set_epoch(member: Member, dataset: Any) -> None:
    """Warn if the dataset has `set_epoch`, because samples are prefetched before the loop can call it."""
    if callable(getattr(dataset, "set_epoch", None)):
        member.rank.warn(
            "run.steps: the dataset has set_epoch, but samples are fetched before the loop calls it, and in other "
            "processes with placement.workers; draw random changes in __getitem__ instead"
        )


def check_dataset(member: Member, dataset: Any, items: Items) -> DatasetCheck:
    """Compute a digest of the first and last sample of a dataset. In a new run, also check its samples for faults.

    This runs on a single rank too, so that a dataset that counts its calls behaves the same for any number of ranks.
    """
    with preserve_generators():
        # Read samples twice first, to find samples that differ. The dataset may cache the samples that it returned.
        is_examined = member.checkpoint is None and not items.in_memory
        findings = check_loop_dataset(items, type(dataset).__getitem__) if is_examined else []
        return DatasetCheck(digest_ends(items), [DatasetFault(finding.culprit, finding.text) for finding in findings])
