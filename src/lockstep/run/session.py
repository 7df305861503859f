"""One process's part of a training run, from its place in the world to its exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from lockstep.comm.world import open_world
from lockstep.common.text import printable
from lockstep.config.blame import with_places
from lockstep.config.load import Loaded
from lockstep.errors import EXIT_DONE
from lockstep.ranks.rank_log import log_name
from lockstep.ranks.rendezvous import Rendezvous
from lockstep.ranks.signals import StopRequest
from lockstep.reporting.sink import Sink
from lockstep.run import folder as run_folder
from lockstep.run.build import Setup, setup
from lockstep.run.checks import check_cut, check_kernels
from lockstep.run.compared import started_with
from lockstep.run.computing import computing_device
from lockstep.run.facts import setup_facts
from lockstep.run.first_weights import opened
from lockstep.run.probe.first_look import first_look
from lockstep.run.rank_training import RankTraining, Resumed, Start, sources
from lockstep.run.resolved import Resolved
from lockstep.run.resume import check_at_hand, check_first, read_alike, signing_key
from lockstep.run.resume import resumed as checked_state
from lockstep.run.watching import watched


def run_rank(
    resolved: Resolved,
    rendezvous: Rendezvous,
    start: Start | None,
    ready: Setup | None = None,
    also: Sink | None = None,
) -> int:
    """Train as one of the ranks that have met and return the exit code.

    Where no process of ours came before (`start` None: another launcher), rank 0 claims the run folder and tells the
    others where the run begins. `also` is a sink of rank 0 beside those that the configuration names.
    """
    first = None
    if ready is None:
        with with_places(resolved.loaded):
            loaded, first = opened(resolved.loaded)  # what they are is compared between the ranks
        resolved = replace(resolved, loaded=loaded)
    loaded, placement, recipe, info = resolved.loaded, resolved.placement, resolved.recipe, rendezvous.info
    device = computing_device(placement, info, recipe.threads, recipe.precision)
    stop = StopRequest()
    place = f"rank {info.rank} of {info.size}  local rank {info.local_rank}"
    place = f"{place}  host {rendezvous.rank_log.host}  device {device}\n"
    terminal = sys.stdout
    with ExitStack() as held:
        held.enter_context(watched(rendezvous, placement, device))
        rendezvous.compare(started_with(loaded, device))
        terminal.write(place)  # at once: ranks share the terminal
        terminal.flush()
        agreed = start or held.enter_context(_claimed(rendezvous, loaded))
        if agreed.done:
            terminal.write(f"{agreed.done}\n" if info.rank == 0 else "")
            return EXIT_DONE
        log = held.enter_context(rendezvous.rank_log.logged(agreed.folder / run_folder.LOGS / log_name(info.rank)))
        log.write(place)
        if ready is None:
            with with_places(loaded):
                ready = setup(recipe, first)
                check_first(ready)
                check_cut(resolved, ready)
                if start is None:  # else the process that started this one did
                    check_kernels(placement, ready)
            for warning in ready.warnings if info.rank == 0 else ():
                print(printable(f"warning: {warning}"), file=sys.stderr)
        if info.size > 1:  # else there is nobody to compare with, and samples need not be read for it
            rendezvous.compare(setup_facts(ready) | {"your source files": sources(resolved, ready)})
        resumed = None
        if agreed.checkpoint:
            manifest, snapshot = read_alike(rendezvous, agreed.checkpoint, signing_key(resolved.run))
            resumed = Resumed(snapshot, checked_state(agreed.checkpoint, snapshot, ready), manifest.weights_sha256)
        if resumed is None:
            check_at_hand(ready)
        looks = info.rank == 0 and resumed is None and resolved.run.probe == "auto"
        look = held.enter_context(first_look(ready)) if looks else list
        world = open_world(rendezvous, device, placement.backend)
        training = RankTraining(resolved, ready, world, agreed, resumed, (terminal, log), look, also)
        rendezvous.status = training.status
        code = training.run(stop)
        world.close()
    return code


@contextmanager
def _claimed(rendezvous: Rendezvous, loaded: Loaded) -> Iterator[Start]:
    """Hold the run folder on rank 0 while the block runs, and tell the others where the run begins. All call it."""
    claim = run_folder.claim(loaded) if rendezvous.info.rank == 0 else None
    with claim.held() if claim else nullcontext():
        for note in claim.notes if claim else []:
            print(printable(note), file=sys.stderr)
        path = rendezvous.tell(str(claim.checkpoint or "") if claim else "")
        folder = rendezvous.tell(str(claim.folder) if claim else "")
        done = rendezvous.tell(claim.done if claim else "")
        yield Start(Path(folder), Path(path) if path else None, done)
