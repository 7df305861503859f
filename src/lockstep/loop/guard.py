"""Checks that user code between two calls of Lockstep leaves weights, buffers, gradients and modes unchanged.

When a call of Lockstep ends, the guard notes the state of the model: the version counters of PyTorch, addresses and
identities of tensors, modes and structure. When the next call begins, the state must be the same. Changes made by the
engine in between are noted again. This way, every strategy rejects the same changes, even if a change would have no
effect under that strategy.

Two kinds of writes need extra care:

- Writes through `.data`, which PyTorch doesn't count. While a model is placed, `.data` of its tensors shares their
  version counters.
- Writes to gradients, which each strategy keeps in a different place. The user's code finds a stand-in in `grad` that
  rejects writes. The sum of the gradients is only known at the update, and until then it is in a different place under
  each strategy. Therefore the stand-in has the value nan under every strategy.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Final, TypeVar, cast, final
from weakref import ref

import torch
from torch import Tensor, nn
from torch._C import TensorBase
from torch.nn import Parameter, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.common.own_code import Place, between, is_own, refusal
from lockstep.loop.placing import REST

Refuse = Callable[[bool], Exception]  # called with whether a backward writes


@final
class Withheld(Tensor):
    """A stand-in for a gradient. It has no memory, and a write to it raises the error that `refuse` returns."""

    refuse: Refuse

    @staticmethod
    def __new__(cls, like: Tensor, refuse: Refuse) -> "Withheld":
        made: Withheld = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.refuse = refuse
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Withheld(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with nan instead of withheld gradients. See `torch.Tensor`."""
        named = dict(kwargs or {})
        held = [each for each in tree_leaves((args, named)) if isinstance(each, Withheld)]
        shared = False
        for place, argument in enumerate(func._schema.arguments):
            alias = argument.alias_info
            given = args[place] if place < len(args) else named.get(argument.name)
            if alias is None or not any(isinstance(each, Withheld) for each in tree_leaves(given)):
                continue
            if alias.is_write:
                raise held[0].refuse(torch._C._current_graph_task_id() != -1)
            shared = True
        outputs = func(*tree_map_only(Withheld, _nan, args), **tree_map_only(Withheld, _nan, named))
        # A view could be written in place, so it must be withheld too.
        return tree_map_only(Tensor, lambda each: Withheld(each, held[0].refuse), outputs) if shared else outputs


def _nan(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype, device=tensor.device)


__tracebackhide__ = True  # a test shows the user's line, which broke the contract, and not ours

T = TypeVar("T")

_ADVICE: Final = (
    "let only step.update change weights and buffers; set them before run.place, average or clip a copy outside the "
    "model, and remove DistributedDataParallel, which writes to them too"
)
_GRADIENT: Final = (
    "scale the loss that you pass to step.backward, and clip with step.update(clip=...); step.norm is the gradient norm"
)
_MODE: Final = (
    "call train() and eval() before or after the loop over the micro-batches, and leave the mode within run.each, "
    "which sets evaluation mode"
)
_RESTS_IN_ROWS: Final = (
    "do not change requires_grad, because this strategy gathers weights as they were at run.place; to freeze an "
    "optimizer group, set its lr_scale to 0 or update only the other groups with step.update(of=...); or use strategy "
    "ddp or zero1"
)
_HOOK: Final = "compute the change in the model's forward, which every strategy differentiates, or scale the loss"
_CALLED_WITH: Final = (
    "torch.func.functional_call cannot replace sharded weights; use strategy ddp or zero1, or put the other weights "
    "into a separate module of the model"
)
_IN_LOSS: Final = (
    "compute a penalty on the weights in the model's forward, set weight_decay in the optimizer, or use strategy ddp, "
    "zero1 or zero2"
)
_PLAIN: Final[Any] = TensorBase.data
_TORCHS: Final = (_BatchNorm.forward, SyncBatchNorm.forward)


@final
class Guard:
    """Watches a placed model, and the parameters that it had `before`, by name.

    `kept` are the buffers that the engine keeps the same on all ranks. A training forward may write to them. `gathered`
    returns the tensors that the engine computes with instead of the parameters. Each call of Lockstep begins with
    `check` and ends with `mark`.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Mapping[str, Tensor],
        kept: Collection[Tensor],
        gathered: Callable[[], Mapping[Tensor, Tensor]] = dict,
    ) -> None:
        self.step = 0
        self.last: Place = "", 0
        self._whole_at = self._asked_at = self.last
        self._frozen = False  # whether the last check found temporarily frozen parameters
        own = {id(each) for each in kept}
        self._names: dict[Tensor, str] = {}
        for name, each in chain(model.named_parameters(), model.named_buffers(), before.items()):
            self._names.setdefault(each, name)
        self._tensors = [each for each in self._names if id(each) not in own]
        self._plain = [each for each in self._tensors if type(each) in (Tensor, Parameter)]
        self._parameters = [each for each in self._tensors if isinstance(each, Parameter)]
        still = {id(each) for each in _counted_unmoved(model)}
        self._kept = sorted(kept, key=lambda each: id(each) not in still)
        self._still = sum(id(each) in still for each in kept)  # leading buffers that a forward updates uncounted
        self._modules = {module: name for name, module in model.named_modules()}
        self._parts: list[tuple[str, dict[str, Any]]] = [
            (f"{name}." if name else "", part)
            for module, name in self._modules.items()
            for part in (module._parameters, module._buffers, module._modules)
            if part
        ]
        self._trained = [each for each in self._parameters if each.requires_grad]
        self._stand_ins = [Withheld(each, self._write_error) for each in self._trained]
        self._nothing = [None] * len(self._trained)
        self._shown: Sequence[Tensor | None] = self._nothing  # the stand-ins in place of gradients
        self._withheld: list[Tensor | None] = []  # the gradients while stand-ins replace them
        self._summing = False  # whether the step has had a backward
        self._ask_gathered = gathered
        self._gathered: dict[Tensor, tuple[Tensor, int]] = {}  # of a sharded model: original and version
        self._files: dict[str, bool] = {}  # whether each file is the user's
        self._running = False  # whether user code is running
        self._whole = True  # whether the last check was a whole one
        if any(type(each) is not Parameter for each in model.parameters()):
            self._watch_forwards(model)
            for each in model.parameters():  # only user code can make a graph lead to shards
                if each.requires_grad and type(each) is not Parameter:
                    each.register_hook(partial(self._refuse_dependence, self._names[each]))  # type: ignore[no-untyped-call]
        _Data.install().guards.append(ref(self))
        self._addresses = [*map(Tensor.data_ptr, self._plain)]
        self._states = self._autograd_states()
        self._identities = self._part_ids()
        self.withhold()
        self.mark(moved=True)

    def close(self) -> None:
        """Stop watching."""
        self._running = False
        _Data.install().remove(self)

    def check(self, *, whole: bool = True, modes: bool = False, forward: bool = False, frozen: bool = False) -> None:
        """Raise UsageError if something changed since the last call of Lockstep ended.

        - `whole`: Also check the addresses of tensors, `requires_grad` and gradient hooks. Otherwise only writes and
          replaced parts are checked.
        - `modes`: All modules must be in the marked mode.
        - `forward`: A forward ran, so it may have written to the `kept` buffers.
        - `frozen`: Parameters may be frozen for an evaluation, and must be unfrozen before the next update.
        """
        self._running = False
        self._whole = whole
        if (now := [each._version for each in self._tensors]) != self._versions:
            raise self._refusal(f"{self._names[_first(self._tensors, now, self._versions)]} was modified")
        for tensor, (original, version) in self._gathered.items():
            if tensor._version != version:
                raise self._refusal(f"{self._names[original]} was modified")
        if modes and (now := [each.training for each in self._modules]) != self._modes:
            module = _first(self._modules, now, self._modes)
            mode = "training" if module.training else "evaluation"
            raise self._refusal(f"{self._modules[module] or 'the model'} was switched to {mode} mode", _MODE)
        if self._withheld or forward:
            found = [each.grad for each in self._trained]
            if not all(map(is_, found, self._shown)):
                self._check_gradients(found)
        kept = self._still if forward else len(self._kept)
        if kept and [each._version for each in self._kept[:kept]] != self._kept_versions[:kept]:
            raise self._refusal("a running statistic of BatchNorm was modified")
        self._check_structure()
        if whole:
            if (addresses := [*map(Tensor.data_ptr, self._plain)]) != self._addresses:
                name = self._names[_first(self._plain, addresses, self._addresses)]
                raise self._refusal(f"the storage of {name} was replaced", since=self._whole_at)
            self._check_asked(frozen=frozen)

    def mark(self, *, moved: bool = False, modes: bool = False) -> None:
        """Note the current state, and let user code run. Weights are only noted if they `moved`."""
        if moved:
            self._summing = False
            self._versions = [each._version for each in self._tensors]
        if modes:
            self._modes = [each.training for each in self._modules]
        if self._kept:
            self._kept_versions = [each._version for each in self._kept]
        if not self._running:  # otherwise nothing was checked since
            self.last = self.line()
            if moved or self._whole:
                self._whole_at = self.last
                if not self._frozen:
                    self._asked_at = self.last
            self._running = True

    def line(self) -> Place:
        """Return the calling line of user code. This is faster than `own_code.calling`."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            own = self._files.get(name)
            if own is None:
                own = self._files[name] = is_own(name)
            if own:
                return name, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return "", 0

    def withhold(self) -> None:
        """Replace gradients with stand-ins that reject writes."""
        self._withheld, self._shown = [each.grad for each in self._trained], self._stand_ins
        for parameter, stand_in in zip(self._trained, self._stand_ins, strict=True):
            parameter.grad = stand_in
        self._summing = bool(self.step)

    def give_back(self) -> None:
        """Put the gradients back in place."""
        for parameter, gradient in zip(self._trained, self._withheld, strict=False):
            parameter.grad = gradient
        self._withheld, self._shown = [], self._nothing

    def watches(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs to the model while user code is running."""
        return self._running and (tensor in self._names or tensor in self._gathered)

    def refuse_data(self, tensor: Tensor) -> None:
        """Raise UsageError if user code sets `.data` of a watched tensor."""
        if self._running and isinstance(tensor, Withheld):
            raise self._write_error(False)
        if self.watches(tensor):
            name = self._names[self._gathered[tensor][0] if tensor in self._gathered else tensor]
            raise refusal(f"{self._at}the storage of {name} was replaced", _ADVICE)

    def _check_gradients(self, found: Sequence[Tensor | None]) -> None:
        for parameter, one, other in zip(self._trained, found, self._shown, strict=True):
            # zero_grad() before the first backward is harmless.
            if one is not other and (self._summing or one is not None):
                done = "removed" if one is None else "set"
                raise self._refusal(f"the gradient of {self._names[parameter]} was {done}", _GRADIENT)

    def _check_asked(self, *, hooks: bool = True, frozen: bool = False, in_rows: bool = False) -> None:
        self._frozen = False
        if (found := self._autograd_states()) == self._states:
            return
        for parameter, now, was in zip(self._parameters, found, self._states, strict=True):
            if now[0] != was[0]:
                self._frozen = True
                if not frozen:
                    advice = _RESTS_IN_ROWS if in_rows else REST
                    done = "frozen" if was[0] else "unfrozen"
                    raise self._refusal(f"{self._names[parameter]} was {done}", advice, self._asked_at)
            if hooks and now[1:] != was[1:]:
                text = f"a gradient hook was added to {self._names[parameter]}"
                raise self._refusal(text, _HOOK, self._whole_at)

    def _write_error(self, by_backward: bool) -> Exception:
        if by_backward:
            return refusal(
                f"{self._at}a backward other than step.backward adds to the gradients of the placed model",
                "pass the whole loss to step.backward(mean=loss), once for each micro-batch; to compute a derivative "
                "without changing gradients, call torch.autograd.grad",
            )
        return refusal(f"{self._at}a gradient of the placed model was modified", _GRADIENT)

    def _check_structure(self) -> None:
        if self._part_ids() != self._identities:
            self._note_gathered()  # tensors that were gathered with other tensors but not called
        if (found := self._part_ids()) != self._identities:
            places = [f"{prefix}{name}" for prefix, part in self._parts for name in part]
            places += ["a part of the model"] * len(found)
            place = _first(places, [*found, None], [*self._identities, None, None])
            raise self._refusal(f"{place} was replaced")

    def _autograd_states(self) -> list[tuple[bool, tuple[int, ...], tuple[int, ...]]]:
        return [
            (each.requires_grad, (*(each._backward_hooks or ()),), (*(each._post_accumulate_grad_hooks or ()),))
            for each in self._parameters
        ]

    def _part_ids(self) -> list[int]:
        """Return the identities of all parts of the modules. A gathered tensor counts as its original."""
        found = [id(each) for _, part in self._parts for each in part.values()]
        if not self._gathered:
            return found
        originals = {id(tensor): id(original) for tensor, (original, _) in self._gathered.items()}
        return [originals.get(each, each) for each in found]

    def _watch_forwards(self, model: nn.Module) -> None:
        """Watch the tensors that a sharded model gathers for a forward and drops after it."""
        model.register_forward_pre_hook(self._before_model, prepend=True)
        for module in self._modules:
            if any(each is not None for each in module._parameters.values()):
                module.register_forward_pre_hook(self._before_gathering, prepend=True)
                module.register_forward_pre_hook(self._before_forward)
                module.register_forward_hook(self._after_forward, prepend=True)

    def _before_model(self, _module: nn.Module, _inputs: Any) -> None:
        if self._running:
            self._check_structure()  # check first, since gathering overwrites replaced parameters
            self._check_asked(hooks=False, in_rows=True)  # it decides which tensors backward gathers

    def _before_gathering(self, module: nn.Module, _inputs: Any) -> None:
        if self._running and (other := self._unknown(module)):
            raise refusal(f"{self._at}{other} is called with different weights, but would use its own", _CALLED_WITH)

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        self._unknown(module)

    def _unknown(self, module: nn.Module) -> str:
        """Note the gathered tensors of a module. If some of its tensors aren't known, return the name of the module."""
        if not self._knows(module):
            self._note_gathered()
        return "" if self._knows(module) else self._modules[module] or "the model"

    def _knows(self, module: nn.Module) -> bool:
        held = [each for each in module._parameters.values() if each is not None]
        return all(each in self._names or each in self._gathered for each in held)

    def _note_gathered(self) -> None:
        for tensor, original in self._ask_gathered().items():
            self._gathered.setdefault(tensor, (original, tensor._version))

    def _after_forward(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        for tensor in module._parameters.values():
            if tensor in self._gathered and tensor._version != self._gathered[tensor][1]:
                name = self._names[self._gathered[tensor][0]]
                raise refusal(f"{self._at}{name} was modified in a forward", _ADVICE)

    def _refuse_dependence(self, name: str, _gradient: Tensor) -> None:
        raise refusal(f"{self._at}the loss depends on this rank's shard of {name}", _IN_LOSS)

    @property
    def _at(self) -> str:
        return f"step {self.step}: " if self.step else ""

    def _refusal(self, text: str, advice: str = _ADVICE, since: Place | None = None) -> Exception:
        return refusal(f"{self._at}{text}", advice, between(since or self.last, self.line()))


@final
class Unguarded:
    """Replaces the guard and lets user code change anything, for tests that `lockstep.verify` finds the effects."""

    step = 0
    last: Place = "", 0

    def check(self, *, whole: bool = True, modes: bool = False, forward: bool = False, frozen: bool = False) -> None:
        """See Guard."""

    def mark(self, *, moved: bool = False, modes: bool = False) -> None:
        """See Guard."""

    def line(self) -> Place:
        """Return an empty line."""
        return self.last

    def withhold(self) -> None:
        """See Guard."""

    def give_back(self) -> None:
        """See Guard."""

    def close(self) -> None:
        """See Guard."""


@final
class _Data:
    """Replaces `Tensor.data` while there are guards.

    For a watched tensor, it returns a tensor that shares the version counter.
    """

    def __init__(self) -> None:
        self.guards: list[ref[Guard]] = []

    @staticmethod
    def install() -> "_Data":
        found = vars(Tensor).get("data")
        if not isinstance(found, _Data):
            found = Tensor.data = _Data()  # type: ignore[assignment]
        return found

    def remove(self, guard: Guard) -> None:
        self.guards = [each for each in self.guards if each() not in (guard, None)]
        if not self.guards:
            del Tensor.data

    def __get__(self, tensor: Tensor | None, _owner: type | None = None) -> Any:
        if tensor is None:
            return _PLAIN
        if any(guard.watches(tensor) for each in self.guards if (guard := each()) is not None):
            return tensor.detach()
        return _PLAIN.__get__(tensor)

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        for each in self.guards:
            if (guard := each()) is not None:
                guard.refuse_data(tensor)
        _PLAIN.__set__(tensor, value)


def _counted_unmoved(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that BatchNorm of PyTorch updates without counting. Only other writes change their versions."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and type(module).forward in _TORCHS and module.running_mean is not None:
            yield from (module.running_mean, cast(Tensor, module.running_var))


def _first(places: Iterable[T], now: Sequence[object], before: Sequence[object]) -> T:
    """Return the first place that has changed."""
    return next(place for place, found, was in zip(places, now, before, strict=False) if found != was)
