"""Checks the user's data, model and loss in a single process, before training on any placement.

A micro-batch must give the same result on every rank, regardless of earlier micro-batches. To check this, the probe
runs two micro-batches with a new copy of the model. A second copy runs only the second micro-batch, and a third copy
runs the first micro-batch while the process poses as another rank. The probe also compares the attributes, buffers,
global variables and random number generator states before and after the forward passes.

The probe modifies this state, so run it in a separate process.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.comm.world import World
from lockstep.common.importing import import_object
from lockstep.common.rank import ALONE
from lockstep.common.user_code import find_source_line as find_error_line
from lockstep.core import random
from lockstep.core.batch import call_model, get_tensors, leaves_with_paths, map_tensors
from lockstep.core.mesh import DataRank
from lockstep.core.order import Steps
from lockstep.core.precision import Precision
from lockstep.core.several_losses import add_losses
from lockstep.core.shuffle import make_shuffled_order
from lockstep.data.base import Split
from lockstep.data.items import CheckedSplit, ImportedSplit, MapStyleSplit
from lockstep.device.fake_rank_env import simulate_rank
from lockstep.device.precision import autocast
from lockstep.errors import TrainingError, UserCodeError
from lockstep.models.initialization import initialize_model
from lockstep.parallel.numerics import Numerics
from lockstep.parallel.weights import convert_compute_dtype
from lockstep.probe.findings import LossComparison, ProbeResult, RandomSample, make_findings
from lockstep.probe.state import CACHE, GlobalState, ModelState, digest_weights, get_rng_states
from lockstep.probe.traits import ModelTraits
from lockstep.probe.witness import CLOCK, RANK, record_reads
from lockstep.reporting.verification import CodeFinding
from lockstep.setup import user_code
from lockstep.setup.build import Setup
from lockstep.tasks.base import MicroBatch
from lockstep.training.checkpoint.tensorfile import digest_tensors

_NUM_SAMPLES: Final = 8  # number of samples to fetch twice from each split
_NUM_QUICK_SAMPLES: Final = 4  # number of samples in a quick check, per split and per micro-batch
_LARGE_SAMPLE_SIZE: Final = 1 << 14  # number of elements in a sample above which a quick check uses fewer samples
_MAX_LOSS_SAMPLES: Final = 32  # maximum number of samples whose loss is computed individually
_RANDOM_CALLS: Final = "random draws"
_NO_KERNEL_MESSAGE: Final = "does not have a deterministic implementation"

T = TypeVar("T")
ResultDigests = Mapping[str, str]  # the digest of each gradient by parameter name, and of the loss under ""


@dataclass(frozen=True)
class _ProbeSettings:
    """The settings of a probe. `backward` is whether to run the backward pass too."""

    build_model: Callable[[], nn.Module]
    microbatches: Sequence[MicroBatch]
    precision: Precision
    backward: bool


def run_probe(setup: Setup, device: torch.device) -> ProbeResult:
    """Check the data, the model and the loss of a recipe on a device, in the precision of the recipe."""
    samples = find_changing_samples(setup, _NUM_SAMPLES)
    traits = ModelTraits()
    build = traits.wrap_builder(setup.problem.build_model)
    settings = _ProbeSettings(build, _load_first_microbatches(setup, device), setup.recipe.precision, backward=True)
    result = _run_probe(setup, device, settings, samples)
    modules = user_code.get_user_modules(user_code.get_import_paths(setup.recipe).values())
    return replace(result, traits=traits.describe(modules.items()))


def run_quick_probe(setup: Setup, check_samples: bool, check_forward: bool) -> ProbeResult:
    """Check a few samples if `check_samples` is set, and the forward pass on the CPU if `check_forward` is set.

    The forward pass runs in float32. Problems that only occur in the backward pass or on another device aren't found.
    """
    samples_found = find_changing_samples(setup, _NUM_QUICK_SAMPLES) if check_samples else []
    if not check_forward:
        return ProbeResult(random_samples=samples_found, source_lines=_find_source_lines(setup))
    recipe, device = setup.recipe, torch.device("cpu")
    sample_size = sum(tensor[0].numel() for tensor in get_tensors(setup.problem.example))  # in elements
    num_samples = 2 if sample_size > _LARGE_SAMPLE_SIZE else _NUM_QUICK_SAMPLES
    batch = min(2 * min(num_samples, -(-recipe.batch // recipe.microbatches)), len(setup.data.train))
    reduced = replace(
        setup, recipe=recipe.model_copy(update={"microbatches": 2}), steps=Steps(len(setup.data.train), batch, steps=1)
    )
    build = partial(initialize_model, setup.build_blank, recipe.seed)
    return _run_probe(
        setup,
        device,
        _ProbeSettings(build, _load_first_microbatches(reduced, device), "fp32", backward=False),
        samples_found,
    )


def find_changing_samples(setup: Setup, count: int) -> list[RandomSample]:
    """Fetch some samples of each split twice, and once more as another rank. Return the samples that changed."""
    seed = setup.recipe.seed
    length = len(setup.data.train)
    order = make_shuffled_order(seed, 0, length)(np.arange(min(count, length))).tolist()
    parts: list[tuple[str, Split, list[int], int | None]] = [
        ("training", setup.data.train, order, random.make_key(random.AUGMENT, seed, 0)),
    ]
    if setup.data.validation is not None:
        validation_indices = [*range(min(count, len(setup.data.validation)))]
        parts.append(("validation", setup.data.validation, validation_indices, None))
    return [
        sample
        for part, split, indices, random_key in parts
        for sample in _iterate_changing_samples(part, split, indices, random_key)
    ]


def check_loop_dataset(split: Split, fetch_method: object) -> list[CodeFinding]:
    """Fetch the first and the last item of a custom loop's dataset twice. Return the findings if an item changes.

    `fetch_method` is the method of the dataset that fetches an item. The findings name its source line.
    """
    try:
        changing_samples = [
            *_iterate_changing_samples("training", split, sorted({0, len(split) - 1}), None, across_ranks=False)
        ]
    except TrainingError:  # an unreadable file, which training reports when it reads the item
        return []
    return make_findings(
        ProbeResult(random_samples=changing_samples, source_lines={"data": user_code.find_source_line(fetch_method)})
    )


def _iterate_changing_samples(
    split_name: str, split: Split, indices: Sequence[int], random_key: int | None, across_ranks: bool = True
) -> Iterator[RandomSample]:
    _compute_sample_digests(split, indices[:1], random_key)  # a dataset may draw random numbers only for its first item
    first = _compute_sample_digests(split, indices, random_key)
    second = _compute_sample_digests(split, indices[::-1], random_key)[::-1]
    checks_rank = across_ranks and first == second
    other_digests = (
        _run_as_other_rank(lambda: _compute_sample_digests(split, indices, random_key), first)
        if checks_rank
        else second
    )
    for index, first_digests, second_digests in zip(indices, first, other_digests, strict=True):
        if difference := _describe_difference(first_digests, second_digests):
            yield RandomSample(split_name, index, difference, checks_rank)


def _run_as_other_rank(compute: Callable[[], T], fallback: T) -> T:
    """Return the result of `compute` while this process poses as rank 1 of 2, or `fallback` if it raises an exception.

    Code that waits for other ranks raises an exception, because they don't exist. This doesn't mean that the code
    depends on the rank.
    """
    try:
        with simulate_rank(1, 2):
            return compute()
    except Exception:  # user code may raise any exception
        return fallback


def _load_first_microbatches(setup: Setup, device: torch.device) -> list[MicroBatch]:
    """Return the micro-batches of the first step."""
    loader = setup.make_loader(World(ALONE, device), DataRank(), 0)
    with closing(loader.iterate_steps(0)) as batches:  # type: ignore[type-var]
        return next(batches)[1]


def _run_probe(
    setup: Setup, device: torch.device, settings: _ProbeSettings, samples: Sequence[RandomSample]
) -> ProbeResult:
    try:
        return _Probe(setup, device, settings).run(samples)
    except (RuntimeError, UserCodeError) as raised:
        error = raised.__cause__ if isinstance(raised, UserCodeError) and raised.__cause__ else raised
        if _NO_KERNEL_MESSAGE not in str(error):
            raise
        message = str(error).partition(", but you set")[0].splitlines()[0]
        location = find_error_line(error)
        return ProbeResult(
            random_samples=samples,
            missing_kernel=message,
            source_lines=_find_source_lines(setup) | {"kernel": location},
        )


@final
class _Probe:
    """Runs micro-batches on new copies of the model, and compares the results."""

    def __init__(self, setup: Setup, device: torch.device, settings: _ProbeSettings) -> None:
        self._setup = setup
        self._world = World(ALONE, device)
        self._settings = settings
        recipe = setup.recipe.model_copy(update={"precision": settings.precision})
        self._numerics = Numerics(recipe, checks_writes=False)
        self._modules = user_code.get_user_modules(user_code.get_import_paths(setup.recipe).values())

    def run(self, samples: Sequence[RandomSample]) -> ProbeResult:
        """Run the micro-batches and return the observations."""
        model, first, second = self._build_model(), self._settings.microbatches[0], self._settings.microbatches[-1]
        kinds = {type(module) for module in model.modules()}
        before, rng_states_before, globals_before = (
            ModelState(model),
            get_rng_states(),
            GlobalState(self._modules, kinds),
        )
        first_result = self._run_microbatch(model, first)
        used_generators = [name for name, state in get_rng_states().items() if state != rng_states_before[name]]
        second_result = self._run_microbatch(model, second) if second is not first else first_result
        after, globals_after = ModelState(model), GlobalState(self._modules, kinds)
        unused_names = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and name not in {*first_result, *second_result}
        ]
        fresh_model = self._build_model()
        alone_result = self._run_microbatch(fresh_model, second)
        changed, after_second_only = before.find_buffer_changes(after), ModelState(fresh_model)
        has_custom_loss = ":" in self._setup.recipe.loss.name
        loss = self._compare_losses(fresh_model, first) if self._settings.backward or has_custom_loss else None
        other_rank_result = _run_as_other_rank(lambda: self._run_microbatch(self._build_model(), first), first_result)
        repeated_result = (
            first_result if other_rank_result == first_result else self._run_microbatch(self._build_model(), first)
        )
        repeated = _describe_first_difference(first_result, repeated_result)
        attributes, variables = before.find_attribute_changes(after), globals_before.find_changes(globals_after)
        accumulating = [name for name in changed if after_second_only.buffers[name] != after.buffers[name]]
        difference_without_previous = (
            _describe_first_difference(second_result, alone_result) if second is not first else ""
        )
        explained = attributes or variables or used_generators or accumulating or repeated
        # A cache is only reported if results differ, or if the forward pass draws random numbers.
        if not (difference_without_previous or used_generators or repeated):
            variables = {name: how for name, how in variables.items() if not how.startswith(CACHE)}
        norms = before.find_norm_buffer_changes(after) if difference_without_previous and not explained else []
        changed, accumulating = [*changed, *norms], [*accumulating, *norms]
        changed_weights = (
            self._find_weight_changes() if difference_without_previous and not (explained or norms) else []
        )
        checks_evaluation = self._settings.backward and not (
            difference_without_previous or repeated
        )  # otherwise, training shows the cause
        evaluation_difference, evaluation_reads = self._check_evaluation() if checks_evaluation else ("", {})
        source_lines = {name: globals_after.find_source_line(name) for name in variables}
        user_kinds = [kind for kind in kinds if kind.__module__ in self._modules]
        if len(user_kinds) == 1:  # the line of the class is more precise than the function that builds the model
            source_lines["model"] = user_code.find_source_line(user_kinds[0])
        rank_difference = "" if repeated else _describe_first_difference(first_result, other_rank_result)
        no_reads: dict[str, str] = {}
        reads = (
            _run_as_other_rank(lambda: self._record_reads(first), no_reads)
            if used_generators or other_rank_result != first_result
            else no_reads
        )
        if rank_difference and RANK not in reads and CLOCK in reads:
            # The result depends on the clock, not on the rank. The clock didn't advance between the first two runs.
            repeated, rank_difference = rank_difference, ""
        return ProbeResult(
            buffers=[name for name, _ in model.named_buffers()],
            changed_buffers={name: before.kinds[name] for name in changed},
            accumulating_buffers=accumulating,
            changed_weights=changed_weights,
            attributes=attributes,
            variables=variables,
            generators=used_generators,
            unused_parameters=unused_names if self._settings.backward else [],
            random_samples=samples,
            loss=loss,
            differs_on_repeat=repeated,
            differs_without_previous=difference_without_previous,
            differs_by_rank=rank_difference,
            reads=reads,
            differs_in_evaluation=evaluation_difference,
            evaluation_reads=evaluation_reads,
            source_lines=_find_source_lines(self._setup)
            | source_lines
            | _find_tensor_locations(model, [*changed, *attributes, *changed_weights]),
        )

    def _find_weight_changes(self) -> list[str]:
        model = self._build_model()
        before = digest_weights(model)
        self._run_microbatch(model, self._settings.microbatches[0])
        return [name for name, digest in digest_weights(model).items() if digest != before[name]]

    def _check_evaluation(self) -> tuple[str, dict[str, str]]:
        """Evaluate a batch with and without a batch before it, and compare the outputs.

        If the outputs differ, return `outputs`, and the nondeterministic values that the evaluation reads, with their
        source lines. Otherwise, return an empty string and an empty dict.
        """
        first, second = self._settings.microbatches[0], self._settings.microbatches[-1]
        if self._compute_evaluation_digest(self._build_model(), first, second) == self._compute_evaluation_digest(
            self._build_model(), second
        ):
            return "", {}
        model = self._build_model()
        with record_reads() as reads:
            self._compute_evaluation_digest(model, first, second)
        return "outputs", dict(reads)

    @torch.no_grad()
    def _compute_evaluation_digest(self, model: nn.Module, *batches: MicroBatch) -> str:
        """Evaluate the batches in order, and return a digest of the outputs of the last batch."""
        model.eval()
        torch.manual_seed(self._setup.recipe.seed)
        with autocast(self._settings.precision, self._world.device):
            return [digest_tensors(get_tensors(self._call_model(model, batch))) for batch in batches][-1]

    def _build_model(self) -> nn.Module:
        """Build a new copy of the model, and seed the random number generators of Python and NumPy."""
        layout = torch.channels_last if self._numerics.channels_last else torch.preserve_format
        model: nn.Module = self._settings.build_model().to(self._world.device, memory_format=layout)  # type: ignore[call-overload]
        converted_model = convert_compute_dtype(model, self._numerics.dtype)
        converted_model.train()  # not chained, because a custom train() may not return the model
        return converted_model

    def _run_microbatch(self, model: nn.Module, microbatch: MicroBatch) -> ResultDigests:
        model.zero_grad(set_to_none=True)
        loss = add_losses(self._setup.task.loss(self._forward(model, microbatch), microbatch.batch))
        if not self._settings.backward:
            return {"": digest_tensors([loss])}
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"": digest_tensors([loss])} | {name: digest_tensors([gradient]) for name, gradient in gradients.items()}

    def _forward(self, model: nn.Module, microbatch: MicroBatch) -> Any:
        self._world.seed(random.make_key(random.FORWARD, self._setup.recipe.seed, 0, microbatch.index))
        with autocast(self._settings.precision, self._world.device):
            return self._call_model(model, microbatch)

    def _call_model(self, model: nn.Module, microbatch: MicroBatch) -> Any:
        # Clone the inputs, because a model may change them in place.
        inputs = map_tensors(Tensor.clone, self._setup.task.inputs(microbatch.batch))
        return self._numerics.prepare_outputs(call_model(model, self._numerics.prepare_inputs(inputs)))

    @torch.no_grad()
    def _compare_losses(self, model: nn.Module, microbatch: MicroBatch) -> LossComparison:
        """Compute the loss of some samples together, and of each sample individually, from the same outputs."""
        outputs = self._forward(model, microbatch)
        samples = min(microbatch.num_samples, _MAX_LOSS_SAMPLES)

        def compute_loss(rows: slice) -> float:
            row_outputs, batch = (
                map_tensors(lambda tensor: tensor[rows], value) for value in (outputs, microbatch.batch)
            )
            return float(add_losses(self._setup.task.loss(row_outputs, batch)))

        one_by_one = sum(compute_loss(slice(number, number + 1)) for number in range(samples))
        return LossComparison(samples, compute_loss(slice(samples)), one_by_one)

    def _record_reads(self, microbatch: MicroBatch) -> dict[str, str]:
        """Build the model and run a micro-batch. Return the nondeterministic values that are read, by source."""
        with record_reads() as recorded:
            self._run_microbatch(self._build_model(), microbatch)
        return dict(recorded)


def _find_source_lines(setup: Setup) -> dict[str, str]:
    """Return the source lines of the user's model, loss and dataset by key (see `ProbeResult.source_lines`)."""
    recipe = setup.recipe
    paths = user_code.get_import_paths(recipe)
    locations = {part: user_code.find_source_line(import_object(path, part)) for part, path in paths.items()}
    if "data" in paths:
        parts = {"training": setup.data.train, "validation": setup.data.validation}
        splits = {part: split for part, split in parts.items() if split is not None}
        locations |= {
            part: user_code.find_source_line(_get_fetch_function(split)) or locations["data"]
            for part, split in splits.items()
        }
    return {part: location for part, location in locations.items() if location}


def _get_fetch_function(split: Split) -> object:
    """Return the user's function that fetches samples of a split."""
    if isinstance(split, ImportedSplit):
        return type(split.dataset).__getitem__
    return type(split.split if isinstance(split, CheckedSplit) else split).fetch


def _find_tensor_locations(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the source lines that change the given attributes, buffers and weights of a model, by name."""
    locations = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        parts = path.split(".") if path else []
        modules = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        source_lines = (user_code.find_attribute_line(type(module), attribute) for module in modules)
        locations[name] = next(filter(None, source_lines), "")
    return {name: location for name, location in locations.items() if location}


def _compute_sample_digests(split: Split, indices: Sequence[int], random_key: int | None) -> list[dict[str, str]]:
    """Return a dict for each sample, with a digest of each tensor by path.

    If Lockstep seeds the items of the dataset individually, the dict also contains a digest of the states of the random
    number generators after the sample is fetched.
    """
    digests = []
    for index in indices:
        leaves = leaves_with_paths(split.fetch(np.array([index]), random_key))
        digests.append({path: digest_tensors([leaf]) for path, leaf in leaves if isinstance(leaf, Tensor)})
        if isinstance(
            split, MapStyleSplit | ImportedSplit
        ):  # Lockstep seeds the random number generators for each item
            # If a dataset caches an augmented item, fetching it again returns the same values, but doesn't draw random
            # numbers.
            digests[-1][_RANDOM_CALLS] = str([*get_rng_states().values(), digest_tensors([torch.get_rng_state()])])
    return digests


def _describe_difference(left: Mapping[str, str], right: Mapping[str, str]) -> str:
    """Describe the first difference between two samples. Returns an empty string if they are equal."""
    pair_names = {"": "values", "[0]": "inputs", "[1]": "targets"} if len(left.keys() - {_RANDOM_CALLS}) <= 2 else {}
    paths = [path for path in (*left, *right) if left.get(path) != right.get(path)]
    return {_RANDOM_CALLS: _RANDOM_CALLS, **pair_names}.get(paths[0], f"values at {paths[0]}") if paths else ""


def _describe_first_difference(left: ResultDigests, right: ResultDigests) -> str:
    """Describe the first difference between two results. Returns an empty string if they are equal."""
    for name in left.keys() | right.keys() if left.keys() != right.keys() else left:
        if left.get(name) != right.get(name):
            return f"gradient of {name}" if name else "loss"
    return ""
