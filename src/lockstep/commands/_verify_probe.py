"""Looks at the user's data, model and loss in one process, before any placement runs.

A micro-batch must give the same whatever was computed before it and whoever computes it. So two micro-batches are
computed by a fresh copy of the model, the second of them alone by another, the first again by a third; what forward
left behind is looked for in attributes, buffers and generators.
"""

from __future__ import annotations

import json
import random as python_random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.commands import _verify_trace as trace
from lockstep.commands._setup import Setup
from lockstep.commands._verify_causes import Facts, LossFact, RandomSample
from lockstep.commands._verify_run import Job, prepared
from lockstep.core import random
from lockstep.core.mesh import Place
from lockstep.core.order import permutation
from lockstep.data.base import Split
from lockstep.errors import EXIT_DONE
from lockstep.runtime.meeting import Meeting
from lockstep.runtime.precision import autocast, fix_kernels
from lockstep.runtime.world import World, choose_device, open_world
from lockstep.tasks.base import MicroBatch

_FACTS: Final = "facts.json"
_SAMPLES: Final = 8  # fetched twice
_LOSS_SAMPLES: Final = 32  # whose loss is taken one by one
_DEPTH: Final = 4  # of containers and objects in attributes
_BRIEF: Final = 24  # characters of a value that is shown
_NO_KERNEL: Final = "does not have a deterministic implementation"

Computed = Mapping[str, str]  # digests: of the loss, and of gradients by parameter


def probe(job: Job, ready: Setup | None, meeting: Meeting) -> int:
    """Be the process that looks; writes the facts into the job's folder."""
    fix_kernels(job.loaded.config.recipe.threads)
    ready = ready or prepared(job.loaded, job.microbatches, job.validation)
    world = open_world(meeting, choose_device(job.loaded.config.placement.device, meeting.info))
    write(job.folder, facts_of(ready, world, job.microbatches))
    return EXIT_DONE


def write(folder: Path, facts: Facts) -> None:
    """Write facts, for `read`."""
    (folder / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")


def read(folder: Path) -> Facts:
    """Return the facts that a probe wrote."""
    content = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    loss = LossFact(*content["loss"]) if content["loss"] else None
    samples = [RandomSample(*each) for each in content["random_samples"]]
    return Facts(**{**content, "loss": loss, "random_samples": samples})


def facts_of(ready: Setup, world: World, microbatches: int) -> Facts:
    """Look at data, model and loss of a recipe."""
    samples = random_samples(ready)
    with closing(ready.loader(world, Place(), microbatches, 0).training(0)) as batches:  # type: ignore[type-var]
        _, given = next(batches)
    try:
        return _Probe(ready, world, microbatches, given).facts(samples)
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        return Facts(random_samples=samples, refused=str(error).partition(", but you set")[0].splitlines()[0])


def random_samples(ready: Setup) -> list[RandomSample]:
    """Fetch some samples of both parts twice and return those that differ."""
    seed = ready.recipe.seed
    order = permutation(seed, 0, len(ready.data.train))[:_SAMPLES].tolist()
    parts: list[tuple[str, Split, list[int], int | None]] = [
        ("training", ready.data.train, order, random.key(random.AUGMENT, seed, 0)),
        ("validation", ready.data.validation, [*range(min(_SAMPLES, len(ready.data.validation)))], None),
    ]
    found = []
    for part, split, indices, draw in parts:
        first = [_fetched(split, index, draw) for index in indices]
        again = [_fetched(split, index, draw) for index in reversed(indices)][::-1]
        for index, one, other in zip(indices, first, again, strict=True):
            differing = [what for what, a, b in zip(("inputs", "targets"), one, other, strict=True) if a != b]
            found += [RandomSample(part, index, what) for what in differing[:1]]
    return found


@final
class _Probe:
    """Fresh copies of a model, and the first micro-batches of a run."""

    def __init__(self, ready: Setup, world: World, microbatches: int, given: Sequence[MicroBatch]) -> None:
        self._ready = ready
        self._world = world
        self._given = given
        self._numerics = ready.numerics(microbatches)

    def facts(self, samples: Sequence[RandomSample]) -> Facts:
        """Compute, and say what was seen."""
        model, first, second = self._fresh(), self._given[0], self._given[-1]
        before, streams = _State(model), _streams()
        one = self._compute(model, first)
        drawn = [name for name, state in _streams().items() if state != streams[name]]
        two = self._compute(model, second) if second is not first else one
        after = _State(model)
        unused = [name for name, p in model.named_parameters() if p.requires_grad and name not in {*one, *two}]
        again = self._compute(self._fresh(), first)
        other = self._fresh()
        alone = self._compute(other, second)
        changed = before.changed_buffers(after)
        fewer = _State(other)
        return Facts(
            buffers=[name for name, _ in model.named_buffers()],
            changed_buffers={name: before.kinds[name] for name in changed},
            counting_buffers=[name for name in changed if fewer.buffers[name] != after.buffers[name]],
            attributes=before.changed_attributes(after),
            streams=drawn,
            unused=unused,
            random_samples=samples,
            loss=self._loss(other, first),
            repeated=_first_difference(one, again),
            alone=_first_difference(two, alone) if second is not first else "",
        )

    def _fresh(self) -> nn.Module:
        """Build the model; Python's and NumPy's generators are then in one state too."""
        layout = torch.channels_last if self._numerics.channels_last else torch.preserve_format
        model: nn.Module = self._ready.task.build_model().to(self._world.device, memory_format=layout)  # type: ignore[call-overload]
        return model.train()

    def _compute(self, model: nn.Module, microbatch: MicroBatch) -> Computed:
        model.zero_grad(set_to_none=True)
        loss = self._ready.task.loss_sum(self._outputs(model, microbatch), microbatch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"": trace.digest([loss])} | {name: trace.digest([each]) for name, each in gradients.items()}

    def _outputs(self, model: nn.Module, microbatch: MicroBatch) -> Tensor:
        key = random.key(random.FORWARD, self._ready.recipe.seed)
        for generator in self._world.generators():
            generator.manual_seed(random.torch_seed(random.extended(key, 0, microbatch.index)))
        with autocast(self._numerics.precision, self._world.device):
            outputs: Tensor = model(microbatch.inputs.clone())  # a model may change its inputs in place
        return outputs

    @torch.no_grad()
    def _loss(self, model: nn.Module, microbatch: MicroBatch) -> LossFact:
        """Take the loss of some samples together and one by one, of the same outputs."""
        outputs, targets = self._outputs(model, microbatch)[:_LOSS_SAMPLES], microbatch.targets[:_LOSS_SAMPLES]
        together = float(self._ready.task.loss_sum(outputs, targets))
        rows = [slice(number, number + 1) for number in range(len(outputs))]
        one_by_one = sum(float(self._ready.task.loss_sum(outputs[row], targets[row])) for row in rows)
        return LossFact(len(outputs), together, one_by_one)


@final
class _State:
    """Digests of what a forward pass may leave behind in a model, other than in torch's BatchNorm layers."""

    def __init__(self, model: nn.Module) -> None:
        self.kinds: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                for name, buffer in module.named_buffers(recurse=False):
                    self.kinds[prefix + name] = type(module).__name__
                    self.buffers[prefix + name] = trace.digest([buffer])
            for name, value in _plain(module):
                self.attributes[prefix + name] = _shown(value, _DEPTH)

    def changed_buffers(self, after: _State) -> list[str]:
        """Return the names of the buffers that have another value in `after`."""
        return [name for name, value in self.buffers.items() if after.buffers.get(name) != value]

    def changed_attributes(self, after: _State) -> dict[str, str]:
        """Return how attributes changed, by name: `0 -> 2`, or `a tensor`."""
        names = [*self.attributes, *(name for name in after.attributes if name not in self.attributes)]
        pairs = {name: (self.attributes.get(name, "unset"), after.attributes.get(name, "unset")) for name in names}
        return {name: _change(one, other) for name, (one, other) in pairs.items() if one != other}


def _plain(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a module's own code has set on it; torch's bookkeeping is in names that begin so."""
    registries = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
    for name, value in vars(module).items():
        if name not in registries and not name.endswith("_hooks") and "_hooks_" not in name:
            yield name, value


def _shown(value: Any, depth: int) -> str:
    """Write a value so that another state gives another text; what is unknown is its type alone."""
    if isinstance(value, Tensor):
        return f"tensor {trace.digest([value])}"
    if isinstance(value, np.ndarray | np.generic):
        return f"array {value.dtype} {np.asarray(value).tobytes().hex()}"
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, torch.Generator):
        return f"generator {trace.digest([value.get_state()])}"
    if isinstance(value, np.random.Generator):
        return f"generator {value.bit_generator.state}"
    if isinstance(value, python_random.Random):
        return f"generator {value.getstate()}"
    if not depth or isinstance(value, nn.Module | type):
        return type(value).__name__
    if isinstance(value, Mapping):
        return str({_shown(key, depth - 1): _shown(each, depth - 1) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[_shown(each, depth - 1) for each in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_shown(each, depth - 1) for each in value)}"
    return f"{type(value).__name__} {_shown(getattr(value, '__dict__', None), depth - 1)}"


def _change(before: str, after: str) -> str:
    kind, other = before.partition(" ")[0], after.partition(" ")[0]
    if max(len(before), len(after)) <= _BRIEF:
        return f"{before} -> {after}"
    return f"a {kind}" if kind == other else f"{kind} -> {other}"


def _fetched(split: Split, index: int, draw: int | None) -> list[str]:
    return [trace.digest([tensor]) for tensor in split.fetch(np.array([index]), draw)]


def _streams() -> dict[str, str]:
    # NumPy's legacy generator, which np.random.rand and its kin draw from.
    return {"Python's": repr(python_random.getstate()), "NumPy's": repr(np.random.get_state())}


def _first_difference(one: Computed, other: Computed) -> str:
    """Return what differs first, in words: the loss, or the gradient of a parameter."""
    for name in one.keys() | other.keys() if one.keys() != other.keys() else one:
        if one.get(name) != other.get(name):
            return f"gradient of {name}" if name else "loss"
    return ""
