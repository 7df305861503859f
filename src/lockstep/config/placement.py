"""The section `placement`: devices, processes and strategy. It affects time and memory, but not the trained weights."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator

from lockstep.common.rank import RENDEZVOUS_ADDRESS, RENDEZVOUS_ADDRESSES
from lockstep.config.base import BY_NAME, Name, PositiveFloat, PositiveInt, Section

ALIASES: Final = {"fsdp": "zero3"}  # alternative names of strategies
FASTEST: Final = "fastest"  # measures all strategies and selects the fastest, see planning/fastest.py
FOREIGN: Final = ("deepspeed",)  # strategies that use the engine and configuration files of a different framework


def _validate_processes(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError("expected an integer of at least 1, or auto")


class StrategyConfig(Section):
    """A strategy, selected by name. Its options are additional keys of the same mapping."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: Annotated[Name, AfterValidator(lambda name: ALIASES.get(name, name))] = (
        "auto"  # auto: single for one process, ddp for more; fastest: measured before the run starts
    )


class Placement(Section):
    """Where and how a recipe runs. You can change all of these keys when you resume a run."""

    strategy: Annotated[StrategyConfig, BY_NAME, Field(description="a name, or a name and its options")] = (
        StrategyConfig()
    )
    processes: Annotated[int | Literal["auto"], PlainValidator(_validate_processes)] = "auto"
    recompute: Annotated[
        str, Field(pattern=r"^(none|full|every_[1-9]\d*)$", description="none, full, or every_2, every_3, ...")
    ] = "none"  # which blocks recompute activations in the backward pass instead of storing them
    offload_activations: bool = False  # store activations in CPU memory between the forward and backward pass
    device: Literal["auto", "cpu", "cuda"] = "auto"
    affinity: Literal["auto", "off"] = "auto"  # auto: bind a rank on a GPU to the CPU cores near this GPU
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # the communication library
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # loader processes per training process
    audit_every: PositiveInt | None = None  # in steps. A different rank repeats a micro-batch and compares the results
    on_corruption: Literal["end", "go_on"] = "end"  # if an audit fails. go_on: restart without the faulty ranks
    rendezvous: Annotated[str, Field(pattern=RENDEZVOUS_ADDRESS, description=RENDEZVOUS_ADDRESSES)] = "env://"
    timeout_s: PositiveFloat = 600.0  # how long a collective waits for the other ranks
    stall_timeout_s: PositiveFloat = 120.0  # how long a rank waits before it asks which rank is late
    lost_after_s: PositiveFloat = 60.0  # not for local processes: a rank without a heartbeat for this long is lost
    on_stall: Literal["report", "end"] = "report"


def rendezvous_in(words: Sequence[str]) -> str:
    """Return the rendezvous address in the words of a command line. Other words may be invalid."""
    addresses = [word.partition("=")[2] for word in words if word.startswith("placement.rendezvous=")]
    return addresses[-1] if addresses else "env://"
