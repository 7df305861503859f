"""The cards of a host as `nvidia-smi -q -x` and `nvidia-smi topo -m` print them, and what of that is worth a warning.

Between versions of the driver elements were renamed and moved; what is missing, or `N/A`, is None here, or empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

_NUMBER: Final = re.compile(r"\d+(\.\d+)?")
_VERSION: Final = re.compile(r"\d+(\.\d+)*")
_REASON: Final = re.compile(r"clocks_(event|throttle)_reason_")
_NOT_SLOWED: Final = ("gpu_idle", "applications_clocks_setting", "display_clocks_setting")  # idle, or as somebody chose
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")  # topo underlines its heading


@dataclass(frozen=True)
class Card:
    """One card. `bus` is its address as sysfs names it; `slowed` are the reasons why its clocks are low now."""

    name: str
    uuid: str
    bus: str
    memory_mib: int | None
    used_mib: int | None
    persistence: bool | None
    mig: bool
    slices: int  # of MIG
    mode: str  # Default, Exclusive_Process or Prohibited
    ecc: bool | None
    uncorrected: int  # errors of memory since the driver was loaded
    uncorrected_ever: int
    repair: tuple[str, ...]  # what of the memory waits to be repaired, or could not be
    slowed: tuple[str, ...]
    clock_mhz: int | None
    clock_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    power_default_w: float | None
    link_gen: int | None
    link_gen_max: int | None
    link_width: int | None
    link_width_max: int | None
    users: tuple[str, ...]  # processes that compute on it


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi reports of the whole host. `cuda` is the newest CUDA that this driver knows."""

    version: str
    cuda: str
    cards: tuple[Card, ...]


def parse(xml: str) -> Driver:
    """Return what `nvidia-smi -q -x` printed; ValueError where that is something else."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"no XML: {error}") from error
    return Driver(_text(root, "driver_version"), _text(root, "cuda_version"), tuple(map(_card, root.iter("gpu"))))


def _card(gpu: Element) -> Card:
    mig = gpu.find("mig_devices")
    link, power = "pci/pci_gpu_link_info", _power(gpu)
    return Card(
        name=_text(gpu, "product_name"),
        uuid=_text(gpu, "uuid"),
        bus=sysfs_address(_text(gpu, "pci/pci_bus_id") or gpu.get("id", "")),
        memory_mib=_whole(gpu, "fb_memory_usage/total"),
        used_mib=_whole(gpu, "fb_memory_usage/used"),
        persistence=_enabled(gpu, "persistence_mode"),
        mig=bool(_enabled(gpu, "mig_mode/current_mig")),
        slices=0 if mig is None else len(mig.findall("mig_device")),
        mode=_text(gpu, "compute_mode"),
        ecc=_enabled(gpu, "ecc_mode/current_ecc"),
        uncorrected=_uncorrected(gpu.find("ecc_errors/volatile")),
        uncorrected_ever=_uncorrected(gpu.find("ecc_errors/aggregate")),
        repair=tuple(_repair(gpu)),
        slowed=tuple(_slowed(gpu)),
        clock_mhz=_whole(gpu, "clocks/sm_clock"),
        clock_max_mhz=_whole(gpu, "max_clocks/sm_clock"),
        temperature_c=_whole(gpu, "temperature/gpu_temp"),
        power_w=_first(power, "instant_power_draw", "power_draw", "average_power_draw"),
        power_limit_w=_first(power, "current_power_limit", "power_limit", "enforced_power_limit"),
        power_default_w=_first(power, "default_power_limit"),
        link_gen=_whole(gpu, f"{link}/pcie_gen/current_link_gen"),
        link_gen_max=_whole(gpu, f"{link}/pcie_gen/max_link_gen"),
        link_width=_whole(gpu, f"{link}/link_widths/current_link_width"),
        link_width_max=_whole(gpu, f"{link}/link_widths/max_link_width"),
        users=tuple(_users(gpu)),
    )


def sysfs_address(bus: str) -> str:
    """Return a PCI address as sysfs writes it: 0000:9d:00.0 for 00000000:9D:00.0."""
    domain, colon, rest = bus.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _power(gpu: Element) -> Element | None:
    """Return the readings of power, which older drivers call otherwise."""
    new = gpu.find("gpu_power_readings")
    return gpu.find("power_readings") if new is None else new


def _uncorrected(errors: Element | None) -> int:
    """Return how many errors of memory were not corrected; cards before Ampere have a total of double bits."""
    if errors is None:
        return 0
    counts = [_number(each.text) or 0 for each in errors if "uncorrectable" in each.tag]
    return int(sum(counts) or _number(errors.findtext("double_bit/total")) or 0)


def _repair(gpu: Element) -> Iterator[str]:
    names = {
        "remapped_rows/remapped_row_pending": "rows to be remapped at the next reset",
        "remapped_rows/remapped_row_failure": "a row that could not be remapped",
        "retired_pages/pending_retirement": "pages to be retired at the next reset",
    }
    yield from (words for path, words in names.items() if _text(gpu, path) == "Yes")


def _slowed(gpu: Element) -> Iterator[str]:
    for group in ("clocks_event_reasons", "clocks_throttle_reasons"):
        for reason in gpu.findall(f"{group}/*"):
            name = _REASON.sub("", reason.tag)
            if (reason.text or "").strip() == "Active" and name not in _NOT_SLOWED:
                yield name.replace("_", " ")


def _users(gpu: Element) -> Iterator[str]:
    for process in gpu.findall("processes/process_info"):
        if "C" in _text(process, "type"):  # computes; G only draws
            name = _text(process, "process_name") or "unknown"
            yield f"pid {_text(process, 'pid')} {name} {_text(process, 'used_memory')}".rstrip()


def _text(element: Element, path: str) -> str:
    found = (element.findtext(path) or "").strip()
    return "" if found in ("N/A", "[N/A]") else found


def _number(text: str | None) -> float | None:
    match = _NUMBER.match((text or "").strip())
    return float(match[0]) if match else None


def _whole(element: Element, path: str) -> int | None:
    found = _number(_text(element, path))
    return None if found is None else int(found)


def _first(element: Element | None, *names: str) -> float | None:
    numbers = [] if element is None else [_number(_text(element, name)) for name in names]
    return next((number for number in numbers if number is not None), None)


def _enabled(element: Element, path: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(_text(element, path))


def links(topology: str, cards: int) -> list[list[str]]:
    """Return how each two of the first `cards` cards are connected, from what `nvidia-smi topo -m` printed.

    NV18: so many NVLinks; PIX, PXB, PHB, NODE, SYS: ever longer ways over PCIe. Empty where it has no such table.
    """
    rows: list[list[str]] = []
    for line in _ESCAPE.sub("", topology).splitlines():
        words = line.split()
        if len(words) > cards and words[0] == f"GPU{len(rows)}" and not words[1].startswith("GPU"):
            rows.append(words[1 : cards + 1])
    return rows if len(rows) == cards else []


def is_older(version: str, than: str) -> bool:
    """Whether a version of CUDA has a smaller first number: within one of them, drivers run programs of all others."""
    if not (_VERSION.fullmatch(version) and _VERSION.fullmatch(than)):
        return False
    return int(version.partition(".")[0]) < int(than.partition(".")[0])


def warnings(cards: Sequence[Card]) -> list[str]:
    """Return what is wrong with cards or may cost time, the gravest first, each with what to do."""
    each = [text for number, card in enumerate(cards) for text in _warnings(number, card)]
    return [*_mixed(cards), *each]


def _mixed(cards: Sequence[Card]) -> Iterator[str]:
    kinds = Counter(card.name for card in cards)
    if len(kinds) > 1:
        counted = ", ".join(f"{count} {name}" for name, count in kinds.items())
        yield (
            f"cards of several kinds: {counted}; bits are promised for one, and ranks on two are refused: choose with "
            f"CUDA_VISIBLE_DEVICES, and set CUDA_DEVICE_ORDER=PCI_BUS_ID for the numbers to be those of nvidia-smi"
        )


def _warnings(number: int, card: Card) -> Iterator[str]:
    name = f"card {number} ({card.bus})"
    if card.uncorrected:
        yield f"{name}: {card.uncorrected} uncorrected errors of its memory; do not train on it before it was tested"
    elif card.uncorrected_ever:
        yield f"{name}: {card.uncorrected_ever} uncorrected errors of its memory in its life, none since the last start"
    for each in card.repair:
        yield f"{name}: {each}; reset the card, and have it replaced if that stays"
    if card.mode == "Prohibited":
        yield f"{name}: compute mode Prohibited: no program may compute on it; nvidia-smi -c DEFAULT"
    if card.mode == "Exclusive_Process" and card.users:
        yield f"{name}: compute mode Exclusive_Process, and taken by {', '.join(card.users)}"
    elif card.users:
        yield f"{name}: in use by {', '.join(card.users)}"
    if card.slowed:
        yield f"{name}: its clocks are held down now: {', '.join(card.slowed)}"
    if card.mig:
        yield f"{name}: MIG, {card.slices} slices; a process sees one: CUDA_VISIBLE_DEVICES=MIG-... of nvidia-smi -L"
    if card.link_width and card.link_width_max and card.link_width < card.link_width_max:
        yield f"{name}: PCIe x{card.link_width} of x{card.link_width_max}; look at the slot, the riser and the BIOS"
    if card.power_limit_w and card.power_default_w and card.power_limit_w < card.power_default_w:
        yield f"{name}: power limit {card.power_limit_w:.0f} W, its default is {card.power_default_w:.0f} W"
    if card.persistence is False:
        yield f"{name}: persistence mode is off, so the driver starts anew with each program; nvidia-smi -pm 1"
