"""Findings about environment variables that change numbers, hide failures, or slow down a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lockstep.checkup.finding import Finding, Level

_REFUSED: Final = "numbers of float32 on CUDA are not those of the recipe: lockstep train refuses it"
_KERNELS: Final = "kernels are chosen by it: the bits are those of other hosts only where they have the same"
_SLOW: Final = "exchanges take a slower way"


@dataclass(frozen=True)
class Rule:
    """A variable that is harmful if `harmful` returns true for its value, with its consequence and remedy."""

    name: str
    harmful: Callable[[str], bool]
    level: Level
    leads_to: str
    remedy: str = ""


def of_variables(found: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each harmful variable, and one that lists the other variables."""
    harms = [rule for rule in RULES if rule.name in found and rule.harmful(found[rule.name])]
    for rule in harms:
        text = f"{rule.name}={found[rule.name]}"
        yield Finding("variables", rule.level, text, rule.leads_to, rule.remedy or f"unset {rule.name}")
    rest = [f"{name}={value}" for name, value in found.items() if name not in {rule.name for rule in harms}]
    yield Finding("variables", "ok", " ".join(rest) or "none is set that changes numbers, or how ranks exchange")


def _any(_: str) -> bool:
    return True


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _no_number(value: str) -> bool:
    return not (value.partition(",")[0].strip().isdecimal() and int(value.partition(",")[0]))


RULES: Final = (
    Rule("OMP_NUM_THREADS", _no_number, "warning", "threads as many as cores until the recipe's number is set"),
    Rule("NVIDIA_TF32_OVERRIDE", _on, "problem", _REFUSED),
    Rule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _on, "problem", _REFUSED),
    Rule(
        "PYTORCH_TUNABLEOP_ENABLED",
        _on,
        "problem",
        "kernels are chosen by their time: lockstep train refuses it on CUDA",
    ),
    Rule("ATEN_CPU_CAPABILITY", _any, "warning", _KERNELS),
    Rule("MKL_CBWR", _any, "warning", _KERNELS),
    Rule("MKL_ENABLE_INSTRUCTIONS", _any, "warning", _KERNELS),
    Rule("ONEDNN_MAX_CPU_ISA", _any, "warning", _KERNELS),
    Rule("DNNL_MAX_CPU_ISA", _any, "warning", _KERNELS),
    Rule("CUDA_LAUNCH_BLOCKING", _on, "warning", "the CPU waits for each kernel: a debugger's setting, and slow"),
    Rule("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "warning", "each exchange is made twice"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on, "warning", "the CPU waits for each exchange"),
    Rule("NCCL_BLOCKING_WAIT", _on, "warning", "the CPU waits for each exchange"),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        lambda value: not _on(value),
        "problem",
        "a rank that loses another waits for ever in NCCL's exchange",
    ),
    Rule("NCCL_P2P_DISABLE", _on, "warning", f"{_SLOW}: GPUs of one host do not reach each other's memory"),
    Rule("NCCL_SHM_DISABLE", _on, "warning", f"{_SLOW}: ranks of one host go over the network"),
    Rule("NCCL_IB_DISABLE", _on, "warning", f"{_SLOW}: InfiniBand is not used"),
    Rule(
        "NCCL_DEBUG",
        lambda value: value.upper() in ("INFO", "TRACE"),
        "warning",
        "each rank prints pages, from which its messages must be picked out",
        "NCCL_DEBUG=WARN",
    ),
)
