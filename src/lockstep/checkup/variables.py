"""Findings about environment variables that change results, hide failures, or make a run slower."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lockstep.checkup.finding import Finding, Level

_REJECTED: Final = "float32 numbers on CUDA differ from those of the recipe, so lockstep train rejects it"
_KERNELS: Final = "it selects kernels, so other hosts only give the same bits if they have the same value"
_SLOW: Final = "communication is slower"


@dataclass(frozen=True)
class VariableRule:
    """A rule about an environment variable. `is_problematic` returns whether a value causes a problem.

    `leads_to` is the consequence of such a value.
    """

    name: str
    is_problematic: Callable[[str], bool]
    level: Level
    leads_to: str
    remedy: str = ""


def make_variable_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each variable with a problematic value, and a finding that lists the remaining variables."""
    problems = [rule for rule in RULES if rule.name in variables and rule.is_problematic(variables[rule.name])]
    for rule in problems:
        text = f"{rule.name}={variables[rule.name]}"
        yield Finding("variables", rule.level, text, rule.leads_to, rule.remedy or f"unset {rule.name}")
    others = [f"{name}={value}" for name, value in variables.items() if name not in {rule.name for rule in problems}]
    yield Finding("variables", "ok", " ".join(others) or "none is set that changes numbers or communication")


def _is_set(_: str) -> bool:
    return True


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _is_not_positive(value: str) -> bool:
    return not (value.partition(",")[0].strip().isdecimal() and int(value.partition(",")[0]))


RULES: Final = (
    VariableRule(
        "OMP_NUM_THREADS", _is_not_positive, "warning", "one thread per core until the recipe sets the number"
    ),
    VariableRule("NVIDIA_TF32_OVERRIDE", _is_on, "problem", _REJECTED),
    VariableRule("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", _is_on, "problem", _REJECTED),
    VariableRule(
        "PYTORCH_TUNABLEOP_ENABLED",
        _is_on,
        "problem",
        "it selects kernels by their measured time, so lockstep train rejects it on CUDA",
    ),
    VariableRule("ATEN_CPU_CAPABILITY", _is_set, "warning", _KERNELS),
    VariableRule("MKL_CBWR", _is_set, "warning", _KERNELS),
    VariableRule("MKL_ENABLE_INSTRUCTIONS", _is_set, "warning", _KERNELS),
    VariableRule("ONEDNN_MAX_CPU_ISA", _is_set, "warning", _KERNELS),
    VariableRule("DNNL_MAX_CPU_ISA", _is_set, "warning", _KERNELS),
    VariableRule(
        "CUDA_LAUNCH_BLOCKING", _is_on, "warning", "the CPU waits for each kernel, which is slow and only for debugging"
    ),
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "warning", "each collective runs twice"
    ),
    VariableRule("TORCH_NCCL_BLOCKING_WAIT", _is_on, "warning", "the CPU waits for each collective"),
    VariableRule("NCCL_BLOCKING_WAIT", _is_on, "warning", "the CPU waits for each collective"),
    VariableRule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        lambda value: not _is_on(value),
        "problem",
        "if a rank is lost, the other ranks wait forever in NCCL collectives",
    ),
    VariableRule("NCCL_P2P_DISABLE", _is_on, "warning", f"{_SLOW}: GPUs of a host cannot access each other's memory"),
    VariableRule("NCCL_SHM_DISABLE", _is_on, "warning", f"{_SLOW}: ranks of a host communicate over the network"),
    VariableRule("NCCL_IB_DISABLE", _is_on, "warning", f"{_SLOW}: InfiniBand is not used"),
    VariableRule(
        "NCCL_DEBUG",
        lambda value: value.upper() in ("INFO", "TRACE"),
        "warning",
        "each rank prints pages of output, which hide its messages",
        "set NCCL_DEBUG=WARN",
    ),
)
