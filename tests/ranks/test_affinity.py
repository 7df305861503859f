"""Ranks on cards are bound to cores, read from folders that are made up as Linux makes them."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import worlds

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.device.cores import format_cores, parse_cores
from lockstep.ranks.affinity import bind_to_gpu_cores, get_pci_address, make_locality, map_to_first_siblings

CARDS = ["0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0", "0000:c3:00.0"]


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def sysfs(root: Path, online: str, cards: dict[str, tuple[int, str]], threads: dict[int, str] | None = None) -> Path:
    """Write what Linux has of the cores and of each card: its node, and the cores near it."""
    write(root, "devices/system/cpu/online", online)
    for address, (node, near) in cards.items():
        write(root, f"bus/pci/devices/{address}/numa_node", str(node))
        write(root, f"bus/pci/devices/{address}/local_cpulist", near)
    for core, pair in (threads or {}).items():
        write(root, f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", pair)
    return root


def test_a_seat_is_read(tmp_path) -> None:
    root = sysfs(tmp_path, "0-7", {CARDS[0]: (1, "4-7")}, {0: "0,4", 4: "0,4"})
    seat = make_locality("a", CARDS[0], parse_cores("0-5"), root)
    assert (format_cores(seat.near_cores), format_cores(seat.usable_cores), seat.is_limited) == ("4-7", "0-5", True)
    assert not make_locality("a", CARDS[0], parse_cores("0-7"), root).is_limited
    assert map_to_first_siblings(parse_cores("0,4,5"), root) == {0: 0, 4: 0, 5: 5}


@pytest.mark.parametrize("card", [CARDS[0], CARDS[1], CARDS[2]])
def test_a_card_without_a_node_has_no_cores_near(tmp_path, card) -> None:
    """-1: Linux lists all cores as local. A container may not show the card, and a file may not be what it was."""
    root = sysfs(tmp_path, "0-7", {CARDS[0]: (-1, "0-7"), CARDS[1]: (0, "none")})
    assert not make_locality("a", card, parse_cores("0-7"), root).near_cores


def test_the_address_is_that_of_sysfs() -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9D, pci_device_id=0)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=card):
        assert get_pci_address(torch.device("cuda", 0)) == "0000:9d:00.0"


def test_nothing_is_bound_on_the_cpu(tmp_path) -> None:
    assert bind_to_gpu_cores(World(ALONE, torch.device("cpu")), 1, tmp_path) == []


def as_on_cards(world: World, root: Path, threads: int) -> tuple[list[str], set[str]]:
    """Bind a rank as if it computed on card number `world.rank`.

    Return what is said, and the cores of this thread, of one that ran before and of one that is started after.
    """
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=int(CARDS[world.rank][5:7], 16), pci_device_id=0)
    before, device, bound = os.sched_getaffinity(0), world.device, threading.Event()
    found: list[str] = []

    def look() -> None:
        bound.wait()
        found.append(format_cores(os.sched_getaffinity(0)))

    both = [threading.Thread(target=look), threading.Thread(target=look)]
    world.device = torch.device("cuda", world.rank)
    try:
        both[0].start()
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=card):
            said = bind_to_gpu_cores(world, threads, root)
        both[1].start()
        look_here = format_cores(os.sched_getaffinity(0))
        return said, {look_here, *_ended(both, bound, found)}
    finally:  # the ranks of other tests are these processes
        bound.set()
        world.device = device
        for task in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, before)


def _ended(threads: list[threading.Thread], go: threading.Event, found: list[str]) -> list[str]:
    go.set()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    return found


@pytest.fixture
def host(tmp_path) -> tuple[Path, list[int]]:
    """A host with the cores that this process has, the first near three of the cards and the last near the fourth."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs 2 cores")
    near = {card: (0, str(cores[0])) for card in CARDS[:3]} | {CARDS[3]: (1, str(cores[-1]))}
    return sysfs(tmp_path, format_cores(cores), near), cores


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_ranks_run_near_their_cards(host) -> None:
    root, cores = host
    found = worlds.run(4, as_on_cards, root, 1)
    first, last = str(cores[0]), str(cores[-1])
    lines = [f"{first}: near its GPU, shared by 3 ranks: too few to divide"] * 3 + [f"{last}: near its GPU"]
    assert [said for said, _ in found] == [lines] * 4
    assert [cores for _, cores in found] == [{first}] * 3 + [{last}]


@pytest.mark.slow("several ranks")
@pytest.mark.worlds
def test_a_node_of_all_cores_is_shared_out(host) -> None:
    root, cores = host
    sysfs(root, format_cores(cores), {card: (0, format_cores(cores)) for card in CARDS})
    found = worlds.run(2, as_on_cards, root, 1)
    half = (len(cores) + 1) // 2
    assert [cores for _, cores in found] == [{format_cores(cores[:half])}, {format_cores(cores[half:])}]
