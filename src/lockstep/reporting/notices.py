"""Notices about a watched run: its starts and restarts, evaluations, checkpoints, warnings and end."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from lockstep.common.text import format_count, printable_line
from lockstep.reporting import wording
from lockstep.reporting.run_log import get_count, get_text, iterate_metrics

NoticeKind = Literal["start", "evaluation", "checkpoint", "warning", "end"]

_MAX_CHARS: Final = 500  # maximum number of characters in a notice
_MAX_TIME_S: Final = 1e11  # larger timestamps overflow in the functions of the time module


@dataclass(frozen=True)
class Notice:
    """An event of a watched run as printable text.

    `time` is in seconds since 1970, or None if the log has no valid time.
    """

    time: float | None
    kind: NoticeKind
    text: str


def make_notice(event: Mapping[str, Any], fractions: frozenset[str] = frozenset()) -> Notice | None:
    """Return a notice about an event, or None for events without a notice, such as step reports.

    Metrics whose names are in `fractions` are shown as percentages.
    """
    if (found := _describe_event(event, fractions)) is None:
        return None
    kind, words = found
    time = event.get("time")
    valid_time = float(time) if isinstance(time, float | int) and 0 <= time < _MAX_TIME_S else None
    return Notice(valid_time, kind, words[:_MAX_CHARS])


def _describe_event(event: Mapping[str, Any], fraction_metrics: frozenset[str]) -> tuple[NoticeKind, str] | None:
    step = f"{get_count(event, 'step') or 0:,}"
    match event.get("event"):
        case "started":
            placement = (
                f"{get_text(event, 'strategy')} on {get_count(event, 'processes') or '?'}, {get_text(event, 'device')}"
            )
            if event.get("resumed_from") is None:
                return "start", f"started: {placement}"
            lost = f", {again:,} later steps are recomputed" if (again := get_count(event, "again")) else ""
            return "start", f"resumed after step {step}: {placement}{lost}"
        case "warning":
            return "warning", f"warning: {get_text(event, 'text')}"
        case "corrupted":
            return "warning", get_text(event, "text")
        case "skipped":
            files = event.get("files")
            names = [printable_line(each) for each in files if isinstance(each, str)] if isinstance(files, list) else []
            return "warning", f"skipped {format_count(len(names), 'unreadable file')}: {', '.join(names[:3])}"
        case "evaluated":
            named = iterate_metrics(event)
            words = ", ".join(
                f"{name} {wording.format_metric(name, value, name in fraction_metrics)}" for name, value in named
            )
            return "evaluation", f"evaluated after step {step}: {words}"
        case "saved":
            best = ", best so far" if event.get("best") is True else ""
            return "checkpoint", f"saved after step {step}: {get_text(event, 'path')}{best}"
        case "stopped":
            return "end", f"stopped by {get_text(event, 'reason')} after step {step}"
        case "done":
            return "end", f"done after step {step}, weights sha256 {get_text(event, 'weights_sha256')}"
    return None
