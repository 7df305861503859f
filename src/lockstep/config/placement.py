"""The section `placement`: devices, processes and strategy. They affect speed and memory, but not trained weights."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator

from lockstep.common.rank import RENDEZVOUS_ADDRESS, RENDEZVOUS_ADDRESSES
from lockstep.config.base import BY_NAME, Name, PositiveFloat, PositiveInt, Section

ALIASES: Final = {"fsdp": "zero3"}  # alternative names of strategies
FASTEST: Final = "fastest"  # measure all strategies, and select the fastest (planning/fastest.py)
FOREIGN: Final = ("deepspeed",)  # strategies that wrap another framework with its own configuration files


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
    """The devices, processes and strategy of a run. You can change all of these keys when you resume a run."""

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
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # backend of torch.distributed
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # loader processes per training process
    audit_every: PositiveInt | None = None  # interval in steps at which a rank recomputes a micro-batch of another rank
    on_corruption: Literal["end", "go_on"] = "end"  # after a failed audit; go_on: restart without the faulty ranks
    rendezvous: Annotated[str, Field(pattern=RENDEZVOUS_ADDRESS, description=RENDEZVOUS_ADDRESSES)] = "env://"
    timeout_s: PositiveFloat = 600.0  # timeout of collectives
    stall_timeout_s: PositiveFloat = 120.0  # how long a rank waits before it reports which rank is late
    lost_after_s: PositiveFloat = 60.0  # a rank on another host is lost if it sends no heartbeat for this long
    on_stall: Literal["report", "end"] = "report"


def find_rendezvous_address(arguments: Sequence[str]) -> str:
    """Return the rendezvous address that is set in command-line arguments. The other arguments may be invalid."""
    addresses = [word.partition("=")[2] for word in arguments if word.startswith("placement.rendezvous=")]
    return addresses[-1] if addresses else "env://"
