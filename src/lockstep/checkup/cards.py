"""Findings about the GPUs of this host: their properties, their faults, and the reasons why none of them is usable."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from lockstep.checkup.finding import Finding
from lockstep.device.cards import Card, Driver, Evidence, ask_driver, look
from lockstep.device.env_flags import check_switches
from lockstep.device.precision import fix_workspace
from lockstep.errors import UsageError
from lockstep.ranks.member import at_most

_ANSWER_S: Final = 20.0  # without persistence mode, the first answer takes seconds per GPU
_HANGS: Final = f"none within {_ANSWER_S:.0f} s; the driver hangs"
_DEFAULT_MODE: Final = "nvidia-smi -c DEFAULT"
_UNUSED: Final = "a run computes on the CPU, or refuses to start"
_STATE: Final = {True: "on", False: "off", None: "not known"}


def look_at_cards() -> Evidence:
    """Return the evidence about the GPUs. This starts CUDA.

    The query of the driver times out if the driver hangs.
    """
    return look(at_most(_ANSWER_S, ask_driver) or Driver(problem=_HANGS))


def of_gpus(found: Evidence, precision: str, refused: Sequence[str] | None) -> list[Finding]:
    """Return all findings.

    `refused` describes the parts of a recipe that have no exact kernel, or is None if no recipe was given.
    """
    findings = [*_software(found), *_usable(found)]
    for number, card in enumerate(found.driver.cards):
        findings += [_card_facts(number, card), *_faults(number, card)]
    findings += [*_card_kinds(found.driver.cards), *_devices(found), *_variables(precision)]
    findings += [Finding("recipe", "problem", text, "lockstep train refuses it on CUDA") for text in refused or ()]
    if refused == []:
        findings.append(Finding("recipe", "ok", "its model and loss have exact kernels on CUDA"))
    return findings


def _software(found: Evidence) -> Iterator[Finding]:
    newest = f", knows CUDA up to {found.driver.cuda}" if found.driver.cuda else ""
    yield Finding("driver", "ok", f"{found.driver.version or found.kernel or 'none'}{newest}")
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in found.libraries.items()))


def _usable(found: Evidence) -> Iterator[Finding]:
    """Yield the reasons why no GPU can be used, each with its remedy, and the evidence."""
    if found.devices and not found.raised:
        return
    reasons = [*_of_torch(found), *_of_driver(found), *_of_rights(found), *_of_choice(found)]
    if not reasons:
        unknown = "torch finds no card, and nothing of what was looked at says why"
        reasons = [(f"CUDA does not start: {found.raised}" if found.raised else unknown, "look into dmesg")]
    yield from (Finding("cards", "problem", text, _UNUSED, remedy) for text, remedy in reasons)
    files = ", ".join(f"{name}{'' if opens else ' (closed)'}" for name, opens in found.files.items())
    looked = {
        "/proc/driver/nvidia/version": found.kernel or "not there",
        "/dev/nvidia*": files or "not there",
        "libcuda.so.1": found.library or "loads",
        "NVML": found.driver.problem or "answers",
        "CUDA_VISIBLE_DEVICES": "not set" if found.visible is None else repr(found.visible),
        "torch.cuda.init()": found.raised or "starts",
    }
    yield from (Finding(name, "ok", text) for name, text in looked.items())


Reason = tuple[str, str]  # the reason and its remedy


def _of_torch(found: Evidence) -> Iterator[Reason]:
    torch, cuda, known = found.libraries["torch"], found.libraries["CUDA"], found.driver.cuda
    if cuda is None:
        yield f"torch {torch} is built without CUDA", "install one with CUDA (https://pytorch.org/get-started)"
    elif known and _major(known) < _major(cuda):  # a driver supports all minor versions of its major CUDA version
        yield (
            f"the driver knows CUDA up to {known}, and torch {torch} is built with CUDA {cuda}",
            f"install a newer driver, or a torch for CUDA {_major(known)}",
        )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _of_driver(found: Evidence) -> Iterator[Reason]:
    loaded = bool(found.kernel or found.files)
    if found.library and not loaded:
        yield (
            "no driver: neither /proc/driver/nvidia/version nor /dev/nvidia* nor libcuda.so.1 is there",
            "install NVIDIA's, or start the container with its cards (docker run --gpus all)",
        )
    elif loaded and not any(name.removeprefix("/dev/nvidia").isdecimal() for name in found.files):
        text = "the driver is loaded, but no card has a device file (/dev/nvidia0)"
        yield text, "in a container or job, ask for cards"
    elif found.library:
        text = f"the driver is loaded, but not its library: {found.library}"
        yield text, "install the one of the same version"
    elif found.driver.problem:
        yield f"the driver does not answer: {found.driver.problem}", "look for Xid in dmesg"


def _of_rights(found: Evidence) -> Iterator[Reason]:
    closed = sorted(name for name, opens in found.files.items() if not opens)
    if closed:
        yield f"this user may not open {', '.join(closed)}", "see whose they are (ls -l /dev/nvidia*)"


def _of_choice(found: Evidence) -> Iterator[Reason]:
    cards = found.driver.cards
    if found.visible is not None and found.visible.strip() in ("", "-1", "NoDevFiles"):
        yield f"CUDA_VISIBLE_DEVICES is {found.visible!r}, which hides all cards", "unset it, or ask for cards"
    elif found.visible is not None and cards and not found.devices:
        text = f"CUDA_VISIBLE_DEVICES={found.visible} names none of the {len(cards)} cards here"
        yield text, "see nvidia-smi -L"
    if cards and all(card.mode == "Exclusive_Process" and card.users for card in cards):
        users = "; ".join(user for card in cards for user in card.users)
        yield f"all cards are in use exclusively: {users}", "wait, or end what uses them"
    if cards and all(card.mode == "Prohibited" for card in cards):
        yield "all cards are in compute mode Prohibited", _DEFAULT_MODE


def _card_facts(number: int, card: Card) -> Finding:
    unknown = _STATE[None]
    memory = unknown if card.memory_mib is None else f"{card.memory_mib:,} MiB"
    state = f"memory {memory}, ECC {_STATE[card.ecc]}, persistence {_STATE[card.persistence]}"
    text = f"{card.name}, {card.bus}, {card.uuid}, {state}, mode {card.mode or unknown}"
    return Finding(f"card {number}", "ok", text)


def _faults(number: int, card: Card) -> Iterator[Finding]:
    """Yield the faults of a GPU and the settings that slow it down, most serious first."""
    wrong, slow = "numbers in it were wrong", "it costs time, and no bit"

    def warn(text: str, leads_to: str, remedy: str) -> Finding:
        return Finding(f"card {number}", "warning", text, leads_to, remedy)

    if card.uncorrected:
        text = f"{card.uncorrected} uncorrected errors of its memory"
        yield warn(text, wrong, "do not train on it before it was tested")
    elif card.uncorrected_ever:
        text = f"{card.uncorrected_ever} uncorrected errors of its memory in its life, none since the last start"
        yield warn(text, wrong, "test it if more come")
    for each in card.repair:
        yield warn(each, "it has found bad memory", "reset the card, and have it replaced if that stays")
    if card.mode == "Prohibited":
        yield warn("compute mode Prohibited", "no program may compute on it", _DEFAULT_MODE)
    if card.users:
        text, leads_to = f"in use by {', '.join(card.users)}", "they take memory and time"
        if card.mode == "Exclusive_Process":
            leads_to = "its compute mode is Exclusive_Process: nobody else can use it"
        yield warn(text, leads_to, "wait, or end them")
    if card.slowed:
        text = f"its clocks are held down now by {', '.join(card.slowed)}"
        yield warn(text, slow, "see nvidia-smi -q -d PERFORMANCE")
    if card.mig:
        leads_to = "a process sees one slice; ranks on slices of one card have not been tried"
        yield warn("cut in slices by MIG", leads_to, "CUDA_VISIBLE_DEVICES=MIG-... of nvidia-smi -L")
    if card.link_width and card.link_width_max and card.link_width < card.link_width_max:
        text = f"PCIe x{card.link_width} of x{card.link_width_max}"
        yield warn(text, slow, "look at the slot, the riser and the BIOS")
    if card.power_limit_w and card.power_default_w and card.power_limit_w < card.power_default_w:
        text = f"power limit {card.power_limit_w:.0f} W, its default is {card.power_default_w:.0f} W"
        yield warn(text, slow, "nvidia-smi -pl, if nobody wanted it")
    if card.persistence is False:
        leads_to = "the driver starts anew with each program, and forgets its counts of errors"
        yield warn("persistence mode is off", leads_to, "nvidia-smi -pm 1")


def _card_kinds(cards: Sequence[Card]) -> Iterator[Finding]:
    kinds = Counter(card.name for card in cards)
    if len(kinds) > 1:
        text = f"of several kinds: {', '.join(f'{count} {name}' for name, count in kinds.items())}"
        leads_to = "bits are promised for one kind, and ranks on two are refused"
        remedy = "choose with CUDA_VISIBLE_DEVICES, and set CUDA_DEVICE_ORDER=PCI_BUS_ID for the numbers of nvidia-smi"
        yield Finding("cards", "warning", text, leads_to, remedy)


def _devices(found: Evidence) -> Iterator[Finding]:
    """Yield the devices in torch's order, with their GPUs. torch may see fewer of them in a different order."""
    for number, device in enumerate(found.devices):
        own = [at for at, card in enumerate(found.driver.cards) if card.uuid.removeprefix("GPU-") == device.uuid]
        text = f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB, compute capability {device.capability}"
        text += f", card {own[0]}" if own else ""
        if len(found.devices) > 1:
            text += f"; reads the memory of {', '.join(f'cuda:{other}' for other in device.reads) or 'no other'}"
        yield Finding(f"cuda:{number}", "ok", text)


def _variables(precision: str) -> Iterator[Finding]:
    """Yield the environment variables that make a run of this precision differ from its recipe."""
    checks: tuple[Callable[[], None], ...] = (fix_workspace, partial(check_switches, precision))
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield Finding("variables", "warning", str(error), "lockstep train refuses to start")
