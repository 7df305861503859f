"""A pretended CUDA device: tensors that say they are on one, and are computed on the CPU, with real values.

    with Card() as card:
        ...                # torch.empty(3, device="cuda"), training, all of it
    assert not card.waits  # what would have waited for the device, with where it stands
    assert not card.races  # what two streams would have done to one memory in no order

No card is needed, and the bits are those of the CPU. It finds operations on tensors of two devices, synchronizations,
and mistakes with streams: each memory knows which streams wrote and read it, each stream what it has waited for
(vector clocks). What is freed is given out again, as torch's allocator does, to the stream that made it: a race, unless
that stream has waited for all who used it. What it cannot show: kernels, autocast, and what torch does by device below
its dispatcher.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

DEVICE = torch.device("cuda", 0)
# What autograd takes it for: a device type without kernels, streams or threads of its own.
_UNDER = torch.device("lazy", 0)
_WAITING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "unique_dim"}
_COPYING = {"_to_copy", "copy_"}
_SOURCES = ("/lockstep/", "/tests/")
_PRETENDED = (__file__, __file__.replace("card.py", "streams.py"))


@final
class Stream:
    """Stands for torch.cuda.Stream: `seen` is how much of each stream has happened before whatever comes next here."""

    def __init__(self, device: Any = None) -> None:
        self.seen: dict[int, int] = {id(self): 0}
        self.freed: list[dict[int, int]] = []  # last uses of what it made and may be given again

    def tick(self) -> int:
        self.seen[id(self)] += 1
        return self.seen[id(self)]

    def has_seen(self, uses: dict[int, int]) -> bool:
        return all(self.seen.get(stream, 0) >= time for stream, time in uses.items())

    def record_event(self) -> Event:
        return Event(dict(self.seen))

    def wait_event(self, event: Event) -> None:
        for stream, time in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        pass


@final
class Event:
    """Stands for torch.cuda.Event; it never is over, as far as anybody who does not wait can tell."""

    def __init__(self, seen: dict[int, int]) -> None:
        self.seen = seen

    def query(self) -> bool:
        return False


@final
class Memory:
    """Who made, wrote and read a memory of the card, and where it was made."""

    def __init__(self, maker: Stream) -> None:
        self.maker = maker
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.recorded: set[int] = set()
        self.place = place()

    def __del__(self) -> None:
        last = {
            stream: max(self.read.get(stream, 0), self.written.get(stream, 0)) for stream in {*self.read, *self.written}
        }
        self.maker.freed.append({stream: time for stream, time in last.items() if stream not in self.recorded})


@final
class Order:
    """What runs on which stream: `now` is the current one. `races` are texts, with where in our code."""

    def __init__(self) -> None:
        self.now = Stream()
        self.races: list[str] = []

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def make(self) -> Memory:
        """Return memory that is new to whoever asks, and may have been another's."""
        if not all(map(self.now.has_seen, self.now.freed)):
            self.races.append(f"made where another stream may still read: {place()}")
        self.now.freed.clear()
        memory = Memory(self.now)
        memory.written[id(self.now)] = self.now.tick()
        return memory

    def use(self, memory: Memory, writes: bool, what: str, stream: Stream | None = None) -> None:
        stream = stream or self.now
        if not stream.has_seen(memory.written) or (writes and not stream.has_seen(memory.read)):
            self.races.append(f"{what} of what another stream uses, made by {memory.place}: {place()}")
        (memory.written if writes else memory.read)[id(stream)] = stream.tick()


def arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Yield each argument of an operation, its value, and whether that is written to."""
    values = [*zip(func._schema.arguments, args, strict=False)]
    values += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
    for argument, value in values:
        yield argument, value, argument.alias_info is not None and argument.alias_info.is_write


class OnCard(Tensor):
    """A tensor that says it is on the card; `inner` has its values."""

    inner: Tensor
    memory: Memory
    card: Card

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory, card: Card) -> OnCard:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_UNDER,
        )

    def __init__(self, inner: Tensor, memory: Memory, card: Card) -> None:
        self.inner = inner
        self.memory = memory
        self.card = card

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.recorded.add(id(stream))

    def tolist(self) -> Any:
        self.card.wait("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"on the card: {self.inner!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: a tensor of the card was used after the card was left")


class Pretended(TorchDispatchMode):
    """A mode with streams in the place of torch's, and what else it replaces while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._order = Order()
        self.races = self._order.races
        self._stack = ExitStack()

    def replace(self, *others: tuple[Any, str, Any]) -> None:
        for target, name, new in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "current_stream", lambda device=None: self._order.now),
            (torch.cuda, "stream", self._order.on),
            *others,
        ):
            self._stack.enter_context(patch.object(target, name, new))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()


@final
class Card(Pretended):
    """Enter it to have the card. `waits` and `races` are texts: what, and where in our code."""

    # Where torch looks before it starts CUDA for a `device="cuda"`: with a mode there it does not.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._pinned: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def __enter__(self) -> Card:  # type: ignore[override]
        torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
        self.replace(
            (torch.cuda, "default_generators", (torch.default_generator,)),
            (torch.cuda, "synchronize", lambda device=None: self.wait("synchronize")),
            (torch.cuda, "max_memory_allocated", lambda device=None: 0),
            (Tensor, "pin_memory", lambda tensor, device=None: self._pin(tensor)),
            (Tensor, "is_pinned", lambda tensor: id(tensor) in self._pinned),
        )
        # torch.tensor([...], device="cuda") is then made on the CPU, and moved where this can see it.
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())  # type: ignore[attr-defined]
        torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pins = kwargs.pop("pin_memory", None)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        cards = [each for each in given if isinstance(each, OnCard)]
        to = kwargs.get("device")
        meta = to is not None and to.type == "meta"
        name = func._schema.name.split("::")[1]
        if to is None:
            here = bool(cards)
        else:
            here = to.type not in ("cpu", "meta")
            kwargs = kwargs if meta else {**kwargs, "device": torch.device("cpu")}
        self._check_devices(func, name, given, cards)
        if not meta:
            self._check_waits(name, given, cards, here, args, kwargs)
        for _, value, writes in arguments(func, args, kwargs):
            for each in tree_leaves(value):
                if isinstance(each, OnCard):
                    self._order.use(each.memory, writes, str(func))
        if name == "_to_copy" and here != bool(cards):
            kwargs = {**kwargs, "non_blocking": False}
            result = func(
                *tree_map(_inner, args), **tree_map(_inner, kwargs)
            ).clone()  # `to` of the same device copies not
        else:
            result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if not here:
            return self._pin(result) if pins else result
        known = {id(each.inner): each for each in cards}
        return tree_map_only(Tensor, lambda each: known[id(each)] if id(each) in known else self._wrapped(each), result)

    def _wrapped(self, inner: Tensor) -> OnCard:
        key = inner.untyped_storage()._cdata
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = self._order.make()
        return OnCard(inner, memory, self)

    def _check_devices(self, func: Any, name: str, given: list[Tensor], cards: list[OnCard]) -> None:
        others = [each for each in given if not isinstance(each, OnCard) and each.ndim]
        if cards and others and name not in {*_COPYING, "index", "index_put_", "_foreach_copy_"}:
            raise AssertionError(f"{func}: tensors of the card and of the CPU: {[each.shape for each in others]}")

    def _check_waits(
        self, name: str, given: list[Tensor], cards: list[OnCard], here: bool, args: Any, kwargs: Any
    ) -> None:
        crosses = (
            name in _COPYING
            and bool(given)
            and (here != bool(cards) if name == "_to_copy" else 0 < len(cards) < len(given) and given[-1].ndim > 0)
        )
        pinned = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        pinned = pinned and all(id(each) in self._pinned for each in given if not isinstance(each, OnCard))
        masks = name.startswith("index") and any(each.dtype == torch.bool for each in given[1:])
        from_cpu = name.startswith("index") and 0 < len(cards) < len([each for each in given if each.ndim])
        if (cards and name in _WAITING) or (crosses and not pinned) or (cards and masks) or from_cpu:
            self.wait(name)

    def wait(self, name: str) -> None:
        """Note that something waits for the device."""
        self.waits.append(f"{name}: {place()}")

    def _pin(self, tensor: Tensor) -> Tensor:
        assert not isinstance(tensor, OnCard)
        pinned = tensor.clone()
        self._pinned[id(pinned)] = pinned
        return pinned


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnCard) else value


def place() -> str:
    """Return the innermost line of ours, but for this file."""
    for frame, line in traceback.walk_stack(None):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        installed = "site-packages" in file  # of an environment that lies anywhere
        if any(each in file for each in _SOURCES) and not installed and file not in _PRETENDED:
            return f"{file.rpartition('/')[2]}:{line} ({name})"
    return "nowhere of ours"
