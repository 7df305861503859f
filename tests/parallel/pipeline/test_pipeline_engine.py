"""The contract for pipelines: every bit of training is that of one process, whatever the schedule and the cut."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import toys
import worlds
from pipeline_models import in_pipeline, own_trace, recipe
from same_bits import alone as whole_alone
from same_bits import assert_same_bits
from toys import Case, Trace

from lockstep.comm.world import World
from lockstep.parallel.engine import State
from lockstep.parallel.groups import GroupSettings

pytestmark = [pytest.mark.slow("several ranks"), pytest.mark.worlds]
SAID = ("step", "scalars", "names")  # by every rank
SIZES = {"mlp": (1, 2, 3, 4), "skipping": (2, 4), "vit": (3,)}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")

GROUPS = {"decay_bias_and_norm": False}
UNCLIPPED = {"options": {"max_grad_norm": None}}
RESNET = recipe("resnet18", samples=(7, 8), microbatches=3, side=32)
SPLIT = {"schedule": "zero_bubble"}
BY_HAND = {"cut": ("late", "twice")}
# Recipes, and the number of processes and the options under which each is tried.
CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "adamw, averaged": (recipe(optimizer="adamw", ema=True, clip=0.1), 3, SPLIT),
    "lamb, uneven": (recipe(microbatches=3, optimizer="lamb"), 2, {"schedule": "interleaved"}),
    "two parameter groups": (recipe(optimizer="nadamw", by_hand=GROUPS), 3, BY_HAND),
    "groups that count": (
        recipe(optimizer="lambc", by_hand=GROUPS | UNCLIPPED),
        3,
        BY_HAND,
    ),
    "groups by name": (
        recipe(
            optimizer="adamw",
            groups=(GroupSettings(("late*",), 0.5, {"weight_decay": 0.1}), GroupSettings(("*.bias",), 3.0)),
        ),
        3,
        BY_HAND,
    ),
    "frozen in part": (replace(RESNET, freeze=("bn1.*", "layer1.*")), 2, {}),
    "adafactor": (recipe("vit", optimizer="adafactor"), 2, {}),
    "bf16": (recipe("vit", precision="bf16", clip=0.5), 2, SPLIT),
    "bf16-compute": (recipe("mlp", precision="bf16-compute", clip=0.5, ema=True), 3, {}),
    "bf16-compute, split": (recipe(precision="bf16-compute", ema=True), 2, SPLIT),
    "bf16-compute, recomputed": (recipe("vit", precision="bf16-compute", optimizer="adamw"), 2, {"recompute": True}),
    "fp16-compute": (recipe(precision="fp16-compute", clip=0.5, ema=True), 3, {}),
    "fp16-true": (recipe(precision="fp16-true", static_scale=1.0, clip=0.5, optimizer="lars"), 2, {}),
    "fp16, skipping": (recipe(precision="fp16", initial_scale=2.0**20, ema=True), 2, {"schedule": "gpipe"}),
    "fp16, too large on one rank": (recipe("mlp", precision="fp16", initial_scale=2.0**19), 2, {}),
    "not finite, skipped": (recipe(poisoned=1, skip_nonfinite=True, ema=True, clip=0.1), 3, {}),
    "channels last": (recipe(channels_last=True, clip=0.5, optimizer="lars"), 3, {"schedule": "1f1b"}),
    "one micro-batch": (recipe("vit", microbatches=1), 3, SPLIT),
    "more micro-batches": (recipe(microbatches=8), 2, {"schedule": "zero_bubble", "stages_per_rank": 2}),
    "cut by hand": (recipe(clip=0.1), 2, {"cut": ("twice",)}),
    "cut by cost": (recipe(measured=True), 3, {}),
    "recomputed": (recipe(clip=0.1, optimizer="adamw"), 3, {"recompute": True}),
    "recomputed, split": (recipe("vit", precision="bf16"), 2, {"recompute": True, **SPLIT}),
    "two pipelines": (recipe(clip=0.1, ema=True), 4, {"replicate": 2}),
    "two pipelines, uneven": (recipe(microbatches=3, samples=(11, 8, 1)), 4, {"replicate": 2, **SPLIT}),
    "three pipelines of one": (recipe(clip=0.1), 3, {"replicate": 3}),
    "resnet18": (replace(RESNET, clip=1.0), 2, SPLIT),
}


@cache
def alone(name: str) -> Trace:
    case = CASES[name][0] if name in CASES else recipe(name, clip=0.1, samples=(11, 3))
    [trace] = worlds.run(1, own_trace, case)
    return trace


def assert_same(expected: Trace, size: int, case: Case, options: dict[str, Any]) -> None:
    told: Trace = {}
    for rank, trace in enumerate(worlds.run(size, own_trace, in_pipeline(case, options))):
        differing = [name for name in trace if trace[name] != expected[name]]
        assert not differing, f"rank {rank} of {size}"
        assert {name for name in expected if name.startswith(SAID)} <= trace.keys()
        told |= trace
    assert told == expected


def sizes(schedule: str, model: str) -> list[int]:
    """Return the sizes of a model, another one first for each schedule."""
    if (schedule, model) == ("interleaved", "skipping"):
        return [2]  # it cannot be cut into more stages, twice as many as processes
    turn = SCHEDULES.index(schedule) % len(SIZES[model])
    return [*SIZES[model][turn:], *SIZES[model][:turn]]


BEYOND = pytest.mark.slow("the schedule meets this model on another size")


@pytest.mark.parametrize(
    ("schedule", "model", "size"),
    [
        pytest.param(schedule, model, size, marks=BEYOND if turn else ())
        for schedule in SCHEDULES
        for model in SIZES
        for turn, size in enumerate(sizes(schedule, model))
    ],
)
def test_every_schedule_gives_the_bits_of_one_process(schedule: str, model: str, size: int) -> None:
    assert_same(alone(model), size, recipe(model, clip=0.1, samples=(11, 3)), {"schedule": schedule})


@pytest.mark.parametrize("name", CASES)
def test_any_recipe_gives_the_bits_of_one_process(name: str) -> None:
    case, size, options = CASES[name]
    assert_same(alone(name), size, case, options)


def test_what_must_happen_in_the_cases_happens() -> None:
    """The cases are worth nothing where no step is skipped, no gradient clipped, or the model does not move."""
    assert " False " in alone("fp16, skipping")["step 0"]
    assert " False " in alone("not finite, skipped")["step 1"]
    for name in ("mlp", "skipping", "vit"):
        norms = [float.fromhex(text.split()[1]) for step, text in alone(name).items() if step.startswith("step")]
        assert all(norm > 0.1 for norm in norms)
    before = toys.fingerprint(State(toys.build(recipe()).state_dict(), {}))
    after = whole_alone(recipe())
    still = {name.removeprefix("model ") for name in before if name != "scalars" and before[name] == after[name]}
    assert still == {"twice.frozen", "twice.seen"}


# Pipelines that share an optimizer's work by rows: no rank can tell more than its part.
SHARED: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "one stage": (recipe(clip=0.1, ema=True), 2, {"shard": 2}),
    "two stages": (recipe(clip=0.1, ema=True, optimizer="adamw"), 4, {"shard": 2}),
    "lamb, uneven": (recipe(microbatches=3, optimizer="lamb", clip=0.1, samples=(11, 8, 1)), 3, {"shard": 3}),
    "lars, split": (recipe(optimizer="lars"), 4, {"shard": 2, "schedule": "zero_bubble"}),
    "groups": (recipe(optimizer="nadamw", by_hand=GROUPS), 4, {"shard": 2, "schedule": "interleaved"}),
    "fp16, skipping": (recipe(precision="fp16", initial_scale=2.0**20), 4, {"shard": 2}),
    "bf16-compute": (recipe(precision="bf16-compute", clip=0.1, ema=True), 4, {"shard": 2}),
    "fp16-compute": (recipe(precision="fp16-compute", clip=0.1, ema=True), 4, {"shard": 2}),
    "replicas too": (recipe(clip=0.1, optimizer="lamb"), 4, {"replicate": 2, "shard": 2}),
    "of all kinds": (recipe("mlp", optimizer="adamw", microbatches=8), 8, {"replicate": 2, "shard": 2}),
}


@pytest.mark.parametrize("name", SHARED)
def test_pipelines_that_share_the_optimizer_give_the_bits_of_one_process(name: str) -> None:
    case, size, options = SHARED[name]
    assert_same_bits(case, ("pipeline", size, tuple(options.items())))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_goes_on_elsewhere(optimizer: str) -> None:
    """From a pipeline to two that share an optimizer, to one process, and back to another pipeline."""
    case = recipe(optimizer=optimizer, ema=True, samples=(11, 8, 3, 8))
    places: list[tuple[int, dict[str, Any]]] = [(3, {}), (4, {"shard": 2}), (1, {}), (2, SPLIT)]
    state, told = None, {}
    for first, (size, options) in enumerate(places):
        part = replace(case, samples=case.samples[: first + 1], options=tuple(options.items()))
        answers = worlds.run(size, toys.states, part, first, state)
        assert all(trace == answers[0][1] for _, trace in answers)
        state = answers[-1][0]
        told |= answers[0][1]
    assert told == whole_alone(case)


def lying(world: World, case: Case) -> tuple[int, int, list[str]]:
    """Return how many elements lie here and in all, and which parameters have an optimizer's state here."""
    training, _ = toys.trained(world, case)
    state = training.state()
    shards: list[Any] = [*state.model.values()]
    here = [name for name, held in state.optimizer.items() if held.tensor.numel()]  # type: ignore[union-attr]
    training.close()
    return sum(s.tensor.numel() for s in shards), sum(s.shape.numel() for s in shards), here


def test_a_rank_holds_its_stages_alone() -> None:
    case = recipe("mlp", samples=(8,))
    answers = worlds.run(3, lying, case)
    assert sum(here for here, _, _ in answers) == answers[0][1]
    assert all(0 < here < 0.8 * whole for here, whole, _ in answers)
    held = [name for _, _, names in answers for name in names]
    assert len(held) == len(set(held)) == len(toys.build(case).state_dict())


def optimizer_elements(world: World, case: Case) -> tuple[int, int]:
    """Return how many elements of the optimizer's state lie here, and how many of those this rank is to tell."""
    training, _ = toys.trained(world, case)
    held: list[Any] = [*training.state().optimizer.values()]
    training.close()
    return sum(each.tensor.numel() for each in held), sum(each.tensor.numel() for each in held if each.primary)


def test_sharing_pipelines_cut_the_optimizer_s_state() -> None:
    case = recipe("mlp", samples=(8,), optimizer="adamw")
    for options in ({"shard": 2}, {"replicate": 2}):
        answers = worlds.run(4, optimizer_elements, in_pipeline(case, options))
        whole = sum(told for _, told in answers)
        assert whole == sum(here for here, _ in worlds.run(2, optimizer_elements, case))
        assert sum(here for here, _ in answers) == pytest.approx(whole if "shard" in options else 2 * whole, rel=0.03)
