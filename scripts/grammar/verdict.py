"""The verdict a production deserves: whether a program that uses it must train alike everywhere."""

from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a production, from the mildest to the strictest reading of docs/own-loop-rejected.md."""

    RIGHT = "right"  # trains to the same bits on every placement, and after a resume
    ROWS = "rows"  # right, but strategies that keep weights in rows may refuse it and name another strategy
    RESUME = "resume"  # the script keeps state that no checkpoint holds: a resumed run may differ
    STATE = "state"  # the script keeps state that differs between ranks: placements may differ
    WRONG = "wrong"  # depends on the placement, so it must be refused, or be the same everywhere
