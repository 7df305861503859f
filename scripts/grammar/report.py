"""The result of a proof, as JSON and as a table in Markdown."""

from typing import Any

from grammar.programs import all_productions
from grammar.proving import Row, Summary
from grammar.trial import Outcome


def as_json(summary: Summary) -> dict[str, Any]:
    """Return what is kept of a proof."""
    return {
        "programs": len(summary.rows),
        "outcomes": {str(outcome): summary.outcomes[outcome] for outcome in Outcome},
        "right": len(summary.right),
        "right_and_refused": [
            {"message": text, "programs": count, "example": example}
            for text, count, example in summary.classes(summary.right_and_refused)
        ],
        "productions": {
            name: {str(outcome): count for outcome, count in sorted(found.items())}
            for name, found in sorted(summary.by_production().items())
        },
        "failures": [_failure(row) for row in summary.rows if row.result.outcome is Outcome.FAILED],
        "invalid": [
            {"number": row.number, "productions": row.program.productions, "detail": row.result.detail}
            for row in summary.rows
            if row.result.outcome is Outcome.INVALID
        ],
    }


def _failure(row: Row) -> dict[str, Any]:
    result = row.smallest_result or row.result
    return {
        "number": row.number,
        "kind": row.result.kind,
        "place": row.result.place,
        "productions": row.program.productions,
        "smallest": (row.smallest or row.program).productions,
        "detail": result.detail,
    }


def as_table(summary: Summary) -> str:
    """Return the outcomes by production as a table in Markdown."""
    found = summary.by_production()
    columns = [Outcome.SAME, Outcome.REFUSED, Outcome.IN_PART, Outcome.DOCUMENTED, Outcome.FAILED]
    lines = [
        f"| production | programs | {' | '.join(columns)} |",
        f"|---{'|---:' * (len(columns) + 1)}|",
    ]
    for name in all_productions():
        if name in found:
            cells = " | ".join(str(found[name][outcome]) for outcome in columns)
            lines.append(f"| {name} | {sum(found[name].values())} | {cells} |")
    return "\n".join(lines) + "\n"
