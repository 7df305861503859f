"""Findings about the GPUs of this host: their properties, their faults, and the reasons why no GPU is usable."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from lockstep.checkup.finding import Finding
from lockstep.device.cards import GpuInfo, NvmlDevice, NvmlResult, collect_gpu_info, query_nvml
from lockstep.device.env_flags import check_env_flags
from lockstep.device.precision import set_cublas_workspace
from lockstep.errors import UsageError
from lockstep.ranks.member import run_with_timeout

_DRIVER_TIMEOUT_S: Final = (
    20.0  # timeout for querying the driver; without persistence mode, the first query takes seconds per GPU
)
_HANGS: Final = f"no answer within {_DRIVER_TIMEOUT_S:.0f} s, so it hangs"
_DEFAULT_MODE: Final = "run nvidia-smi -c DEFAULT"
_NO_GPU_EFFECT: Final = "a run computes on the CPU, or does not start"
_SETTING_NAMES: Final = {True: "on", False: "off", None: "not known"}


def query_gpus() -> GpuInfo:
    """Query the driver, its files and torch for the GPUs of this host. Initializes CUDA.

    If the driver hangs, the query of the driver times out, and the result reports this.
    """
    return collect_gpu_info(run_with_timeout(_DRIVER_TIMEOUT_S, query_nvml) or NvmlResult(problem=_HANGS))


def make_gpu_findings(evidence: GpuInfo, precision: str, refusals: Sequence[str] | None) -> list[Finding]:
    """Return all findings about the GPUs.

    `refusals` describes the parts of a recipe that have no exact kernel, or is None if there is no recipe.
    """
    findings = [*_make_software_findings(evidence), *_make_usability_findings(evidence)]
    for number, card in enumerate(evidence.driver.cards):
        findings += [_describe_card(number, card), *_find_card_faults(number, card)]
    findings += [
        *_check_same_kind(evidence.driver.cards),
        *_make_device_findings(evidence),
        *_make_variable_findings(precision),
    ]
    findings += [Finding("recipe", "problem", text, "lockstep train rejects it on CUDA") for text in refusals or ()]
    if refusals == []:
        findings.append(Finding("recipe", "ok", "its model and loss have exact kernels on CUDA"))
    return findings


def _make_software_findings(evidence: GpuInfo) -> Iterator[Finding]:
    newest = f", supports CUDA up to {evidence.driver.cuda}" if evidence.driver.cuda else ""
    yield Finding("driver", "ok", f"{evidence.driver.version or evidence.kernel or 'none'}{newest}")
    yield Finding("libraries", "ok", ", ".join(f"{name} {version}" for name, version in evidence.libraries.items()))


def _make_usability_findings(evidence: GpuInfo) -> Iterator[Finding]:
    """If no GPU is usable, yield the reasons with their remedies, followed by the results of all checks."""
    if evidence.devices and not evidence.cuda_error:
        return
    reasons = [
        *_find_torch_reasons(evidence),
        *_find_driver_reasons(evidence),
        *_find_permission_reasons(evidence),
        *_find_selection_reasons(evidence),
    ]
    if not reasons:
        default_reason = "torch finds no GPU, and none of the checks below explains why"
        reasons = [
            (f"CUDA does not start: {evidence.cuda_error}" if evidence.cuda_error else default_reason, "check dmesg")
        ]
    yield from (Finding("cards", "problem", text, _NO_GPU_EFFECT, remedy) for text, remedy in reasons)
    files = ", ".join(f"{name}{'' if opens else ' (no permission)'}" for name, opens in evidence.files.items())
    details = {
        "/proc/driver/nvidia/version": evidence.kernel or "not found",
        "/dev/nvidia*": files or "not found",
        "libcuda.so.1": evidence.library or "loads",
        "NVML": evidence.driver.problem or "answers",
        "CUDA_VISIBLE_DEVICES": "not set" if evidence.visible is None else repr(evidence.visible),
        "torch.cuda.init()": evidence.cuda_error or "starts",
    }
    yield from (Finding(name, "ok", text) for name, text in details.items())


Reason = tuple[str, str]  # a reason and its remedy


def _find_torch_reasons(evidence: GpuInfo) -> Iterator[Reason]:
    torch, cuda, driver_cuda = (
        evidence.libraries["torch"],
        evidence.libraries["CUDA"],
        evidence.driver.cuda,
    )
    if cuda is None:
        yield f"torch {torch} is built without CUDA", "install a build with CUDA (https://pytorch.org/get-started)"
    elif driver_cuda and _parse_major(driver_cuda) < _parse_major(cuda):
        # A driver supports all minor versions of its major CUDA version.
        yield (
            f"the driver supports CUDA up to {driver_cuda}, but torch {torch} is built with CUDA {cuda}",
            f"install a newer driver, or a torch build for CUDA {_parse_major(driver_cuda)}",
        )


def _parse_major(version: str) -> int:
    return int(version.partition(".")[0])


def _find_driver_reasons(evidence: GpuInfo) -> Iterator[Reason]:
    loaded = bool(evidence.kernel or evidence.files)
    if evidence.library and not loaded:
        yield (
            "no driver: /proc/driver/nvidia/version, /dev/nvidia* and libcuda.so.1 do not exist",
            "install the NVIDIA driver, or start the container with GPUs (docker run --gpus all)",
        )
    elif loaded and not any(name.removeprefix("/dev/nvidia").isdecimal() for name in evidence.files):
        text = "the driver is loaded, but no GPU has a device file (/dev/nvidia0)"
        yield text, "in a container or job, request GPUs"
    elif evidence.library:
        text = f"the driver is loaded, but not its library: {evidence.library}"
        yield text, "install the library of the same version"
    elif evidence.driver.problem:
        yield f"the driver does not answer: {evidence.driver.problem}", "check dmesg for Xid errors"


def _find_permission_reasons(evidence: GpuInfo) -> Iterator[Reason]:
    closed = sorted(name for name, opens in evidence.files.items() if not opens)
    if closed:
        yield f"no permission to open {', '.join(closed)}", "check their owner and group (ls -l /dev/nvidia*)"


def _find_selection_reasons(evidence: GpuInfo) -> Iterator[Reason]:
    cards = evidence.driver.cards
    if evidence.visible is not None and evidence.visible.strip() in ("", "-1", "NoDevFiles"):
        yield f"CUDA_VISIBLE_DEVICES is {evidence.visible!r}, which hides all GPUs", "unset it, or request GPUs"
    elif evidence.visible is not None and cards and not evidence.devices:
        text = f"CUDA_VISIBLE_DEVICES={evidence.visible} names none of the {len(cards)} GPUs"
        yield text, "list the GPUs with nvidia-smi -L"
    if cards and all(card.mode == "Exclusive_Process" and card.users for card in cards):
        users = "; ".join(user for card in cards for user in card.users)
        yield f"all GPUs are in exclusive use: {users}", "wait, or end these processes"
    if cards and all(card.mode == "Prohibited" for card in cards):
        yield "all GPUs are in compute mode Prohibited", _DEFAULT_MODE


def _describe_card(card_index: int, card: NvmlDevice) -> Finding:
    unknown_text = _SETTING_NAMES[None]
    memory = unknown_text if card.memory_mib is None else f"{card.memory_mib:,} MiB"
    state = f"memory {memory}, ECC {_SETTING_NAMES[card.ecc]}, persistence {_SETTING_NAMES[card.persistence]}"
    text = f"{card.name}, {card.bus}, {card.uuid}, {state}, mode {card.mode or unknown_text}"
    return Finding(f"card {card_index}", "ok", text)


def _find_card_faults(card_index: int, card: NvmlDevice) -> Iterator[Finding]:
    """Yield the faults of a GPU, and the settings that make it slower. The most serious findings come first."""
    corrupted, slow = "numbers in its memory were wrong", "slower, but the same bits"

    def make_warning(text: str, consequence: str, remedy: str) -> Finding:
        return Finding(f"card {card_index}", "warning", text, consequence, remedy)

    if card.uncorrected:
        text = f"{card.uncorrected} uncorrected memory errors"
        yield make_warning(text, corrupted, "test it before you train on it")
    elif card.uncorrected_ever:
        text = f"{card.uncorrected_ever} uncorrected memory errors over its lifetime, none since the last start"
        yield make_warning(text, corrupted, "test it if there are new errors")
    for defect in card.repair:
        yield make_warning(defect, "it has found bad memory", "reset the GPU, and replace it if this does not help")
    if card.mode == "Prohibited":
        yield make_warning("compute mode Prohibited", "no program can compute on it", _DEFAULT_MODE)
    if card.users:
        text, leads_to = f"in use by {', '.join(card.users)}", "they take memory and time"
        if card.mode == "Exclusive_Process":
            leads_to = "its compute mode is Exclusive_Process, so no other process can use it"
        yield make_warning(text, leads_to, "wait, or end these processes")
    if card.clock_limits:
        text = f"its clocks are currently reduced by {', '.join(card.clock_limits)}"
        yield make_warning(text, slow, "see nvidia-smi -q -d PERFORMANCE")
    if card.mig:
        leads_to = "a process sees one slice; ranks on slices of one GPU have not been tested"
        yield make_warning("split into MIG slices", leads_to, "set CUDA_VISIBLE_DEVICES=MIG-... from nvidia-smi -L")
    if card.link_width and card.link_width_max and card.link_width < card.link_width_max:
        text = f"PCIe x{card.link_width} of x{card.link_width_max}"
        yield make_warning(text, slow, "check the slot, the riser and the BIOS")
    if card.power_limit_w and card.power_default_w and card.power_limit_w < card.power_default_w:
        text = f"power limit {card.power_limit_w:.0f} W, its default is {card.power_default_w:.0f} W"
        yield make_warning(text, slow, "reset it with nvidia-smi -pl, unless it is intended")
    if card.persistence is False:
        leads_to = "the driver restarts for each program and resets its error counts"
        yield make_warning("persistence mode is off", leads_to, "run nvidia-smi -pm 1")


def _check_same_kind(cards: Sequence[NvmlDevice]) -> Iterator[Finding]:
    kinds = Counter(card.name for card in cards)
    if len(kinds) > 1:
        text = f"several kinds: {', '.join(f'{count} {name}' for name, count in kinds.items())}"
        leads_to = "the same bits are only promised on one kind of GPU, and ranks on two kinds are rejected"
        remedy = (
            "select GPUs with CUDA_VISIBLE_DEVICES and, to use the order of nvidia-smi, CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
        yield Finding("cards", "warning", text, leads_to, remedy)


def _make_device_findings(evidence: GpuInfo) -> Iterator[Finding]:
    """Yield a finding for each CUDA device that torch sees, with the index that the driver assigns to its GPU.

    torch may find fewer GPUs than the driver, and number them differently.
    """
    for number, device in enumerate(evidence.devices):
        numbers = [
            index for index, card in enumerate(evidence.driver.cards) if card.uuid.removeprefix("GPU-") == device.uuid
        ]
        text = f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB, compute capability {device.capability}"
        text += f", card {numbers[0]}" if numbers else ""
        if len(evidence.devices) > 1:
            peers = ", ".join(f"cuda:{peer}" for peer in device.peer_devices)
            text += f"; peer access to {peers}" if peers else "; no peer access"
        yield Finding(f"cuda:{number}", "ok", text)


def _make_variable_findings(precision: str) -> Iterator[Finding]:
    """Yield a finding for each environment variable that would stop a run with this precision from starting."""
    checks: tuple[Callable[[], None], ...] = (set_cublas_workspace, partial(check_env_flags, precision))
    for check in checks:
        try:
            check()
        except UsageError as error:
            yield Finding("variables", "warning", str(error), "lockstep train does not start")
