"""What a loop of the user's comes to as a rank of a world: the hash of what it trained, or what it is refused with."""

import inspect
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.comm.stream import CommStream
from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.core import random
from lockstep.data.items import seed_rngs
from lockstep.errors import CorruptionError, UsageError
from lockstep.loop.member import Member
from lockstep.loop.run import Run
from lockstep.loop.settings import validate_settings
from lockstep.run.rank import Rank

Loop = Callable[..., None]
MARK = "  # <-"


def ended(world: World, strategy: str, loop: Loop, audit_every: int | None = None, precision: str = "fp32") -> str:
    """Give a loop a run that has been joined; return what ended it, or the hash of what it trained."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = validate_settings(3, None, precision, 1, {"audit_every": audit_every}, None)
    life: Any = SimpleNamespace(status=None, info=ALONE)
    ends: list[BaseException | None] = []
    held = ExitStack()
    held.push(lambda _kind, error, _trace: ends.append(error) or True)
    streams: list[CommStream] = []
    world.make_stream = lambda: streams.append(World.make_stream(world)) or streams[-1]
    run = Run(Member(given, life, Rank(life, world, None, {}, {}), None, held, strategy))
    seed_rngs(random.make_key(random.INITIAL, 3))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as that a scheduler stepped before an optimizer
            loop(run)
        found = run.fingerprint()
        run.close()
        return found
    except Exception as error:
        run.close(error)
        [end] = ends
        if not isinstance(end, UsageError | CorruptionError):
            raise
        return str(end)
    finally:
        # Other tests use this world: an exchange that a refusal leaves under way would meet one of theirs.
        del world.make_stream
        for stream in streams:
            over = threading.Event()
            with suppress(RuntimeError):  # it is closed
                stream.submit(over.set)
                over.wait(1)
        world.set_compared_values({})
        torch.use_deterministic_algorithms(deterministic)


def names(text: str, function: Loop, mark: str = MARK) -> bool:
    """Return whether a message names the line of a function that ends in a mark, or two lines that it is between."""
    lines, first = inspect.getsourcelines(function)
    [marked] = [first + number for number, line in enumerate(lines) if line.rstrip().endswith(mark)]
    if found := re.search(r"between \S+:(\d+) and \S+:(\d+)\)", text):
        begin, end = map(int, found.groups())
        return begin <= marked <= end or not begin <= end  # or around the end of a loop
    around = r"(?:from \S+:(\d+) to line (\d+) of the next iteration|after \S+:(\d+) and before line (\d+))\)"
    if found := re.search(around, text):
        begin, end = (int(number) for number in found.groups() if number)
        return end < begin and not end < marked < begin
    if found := re.search(r"since \S+:(\d+)\)", text):  # once around the loop
        return first < int(found[1]) < first + len(lines)
    return f"{Path(inspect.getfile(function)).name}:{marked})" in text
