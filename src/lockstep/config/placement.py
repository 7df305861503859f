"""The placement: where and how fast. It decides only time and memory."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator

from lockstep.common.rank import RENDEZVOUS_ADDRESS, RENDEZVOUS_ADDRESSES
from lockstep.config.base import BY_NAME, Name, PositiveFloat, PositiveInt, Section

ALIASES: Final = {"fsdp": "zero3"}  # other names of strategies
FASTEST: Final = "fastest"  # of the strategies, by measuring: planning/fastest.py
FOREIGN: Final = ("deepspeed",)  # strategies in the engine of another framework, which is given files of its own


def _processes(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError("expected a whole number from 1, or auto")


class StrategyConfig(Section):
    """A strategy by name; its own options are keys of the same mapping."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: Annotated[Name, AfterValidator(lambda name: ALIASES.get(name, name))] = (
        "auto"  # single for one process, ddp for more; fastest: measured before the run starts
    )


class Placement(Section):
    """Everything that may change from one start of a run to the next."""

    strategy: Annotated[StrategyConfig, BY_NAME, Field(description="a name, or a name and its options")] = (
        StrategyConfig()
    )
    processes: Annotated[int | Literal["auto"], PlainValidator(_processes)] = "auto"
    recompute: Annotated[
        str, Field(pattern=r"^(none|full|every_[1-9]\d*)$", description="none, full, or every_2, every_3, ...")
    ] = "none"  # which blocks do their forward again in backward instead of keeping its activations
    offload_activations: bool = False  # keep them in the memory of the CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    affinity: Literal["auto", "off"] = "auto"  # a rank on a GPU runs on the cores near its card
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # carries tensors between ranks
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # loader processes beside each training process
    audit_every: PositiveInt | None = None  # steps: another rank repeats a micro-batch, and bits are compared
    on_corruption: Literal["end", "go_on"] = "end"  # with audit_every: go on without the ranks that are wrong
    rendezvous: Annotated[str, Field(pattern=RENDEZVOUS_ADDRESS, description=RENDEZVOUS_ADDRESSES)] = "env://"
    timeout_s: PositiveFloat = 600.0  # how long a collective waits for the other ranks
    stall_timeout_s: PositiveFloat = 120.0  # how long a rank waits for others before it asks who is late
    lost_after_s: PositiveFloat = 60.0  # without a sign of life a rank that another launcher started is given up
    on_stall: Literal["report", "end"] = "report"


def rendezvous_in(words: Sequence[str]) -> str:
    """Return the rendezvous that a command's words set; its other settings may not even be readable."""
    addresses = [word.partition("=")[2] for word in words if word.startswith("placement.rendezvous=")]
    return addresses[-1] if addresses else "env://"
