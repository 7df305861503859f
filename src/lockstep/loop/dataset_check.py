"""Checks the dataset of a custom loop before training."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.data.items import MapStyleSplit, preserve_rng_states
from lockstep.loop.member import Member
from lockstep.probe.probe import check_loop_dataset
from lockstep.training.sample_digest import digest_end_samples


class DatasetFault(NamedTuple):
    """A fault in a dataset, such as a sample that changes between reads. `culprit` names the code that causes it."""

    culprit: str
    text: str


class DatasetCheckResult(NamedTuple):
    """The result of checking a dataset: a digest of its first and last sample, and its faults."""

    ends_digest: str
    faults: Sequence[DatasetFault]


def warn_about_set_epoch(member: Member, dataset: Any) -> None:
    """Warn if the dataset has `set_epoch`, because samples are prefetched before the loop can call it."""
    if callable(getattr(dataset, "set_epoch", None)):
        member.rank.warn(
            "run.steps: set_epoch of the dataset has no reliable effect, because samples are prefetched before the "
            "loop can call it; draw random numbers in __getitem__ instead"
        )


def check_dataset(member: Member, dataset: Any, items: MapStyleSplit) -> DatasetCheckResult:
    """Compute a digest of the first and last sample of a dataset. In a new run, also check its samples for faults.

    This runs on a single rank too, so that a dataset that counts its calls behaves the same for any number of ranks.
    """
    with preserve_rng_states():
        # Check for samples that change between reads before computing the digest, because a dataset may cache samples.
        is_examined = member.checkpoint is None and not items.in_memory
        findings = check_loop_dataset(items, type(dataset).__getitem__) if is_examined else []
        return DatasetCheckResult(
            digest_end_samples(items), [DatasetFault(finding.culprit, finding.text) for finding in findings]
        )
