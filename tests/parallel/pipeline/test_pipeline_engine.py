"""The contract for pipelines: every bit of training is that of one process, whatever the schedule and the cut."""

from dataclasses import replace
from functools import cache
from typing import Any

import pipeline_models
import pytest
import torch
import worlds
from pipeline_models import Case, going_on, own_trace
from toys import Trace

from lockstep.comm.world import World
from lockstep.common.rank import ALONE
from lockstep.parallel.groups import ParameterGroup

SAID = ("step", "outputs", "scalars", "names")  # by every rank
SIZES = {"mlp": (1, 2, 3, 4), "skipping": (2, 4), "vit": (3,)}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")

GROUPS = {"decay_bias_and_norm": False}
UNCLIPPED = {"options": {"max_grad_norm": None}}
# Recipes, and the number of processes and the options under which each is tried.
CASES: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "adamw, averaged": (Case(optimizer="adamw", ema=True, clip=0.1), 3, {"schedule": "zero_bubble"}),
    "lamb, uneven": (Case(microbatches=3, optimizer="lamb"), 2, {"schedule": "interleaved"}),
    "two parameter groups": (Case(optimizer="nadamw", by_hand=GROUPS), 3, {"cut": ("late", "twice")}),
    "groups that count": (Case(optimizer="lambc", by_hand=GROUPS | UNCLIPPED), 3, {"cut": ("late", "twice")}),
    "groups by name": (
        Case(
            optimizer="adamw",
            groups=(ParameterGroup(("late*",), 0.5, {"weight_decay": 0.1}), ParameterGroup(("*.bias",), 3.0)),
        ),
        3,
        {"cut": ("late", "twice")},
    ),
    "frozen in part": (Case("resnet18", samples=(7, 8), microbatches=3, size=32, freeze=("bn1.*", "layer1.*")), 2, {}),
    "adafactor": (Case("vit", optimizer="adafactor"), 2, {}),
    "bf16": (Case("vit", precision="bf16", clip=0.5), 2, {"schedule": "zero_bubble"}),
    "bf16-compute": (Case("mlp", precision="bf16-compute", clip=0.5, ema=True), 3, {}),
    "bf16-compute, split": (Case(precision="bf16-compute", ema=True), 2, {"schedule": "zero_bubble"}),
    "bf16-compute, recomputed": (Case("vit", precision="bf16-compute", optimizer="adamw"), 2, {"recompute": True}),
    "fp16-compute": (Case(precision="fp16-compute", clip=0.5, ema=True), 3, {}),
    "fp16-true": (Case(precision="fp16-true", static_scale=1.0, clip=0.5, optimizer="lars"), 2, {}),
    "fp16, skipping": (Case(precision="fp16", initial_scale=2.0**20, ema=True), 2, {"schedule": "gpipe"}),
    "fp16, too large on one rank": (Case("mlp", precision="fp16", initial_scale=2.0**19), 2, {}),
    "not finite, skipped": (Case(poisoned=1, skip_nonfinite=True, ema=True, clip=0.1), 3, {}),
    "channels last": (Case(channels_last=True, clip=0.5, optimizer="lars"), 3, {"schedule": "1f1b"}),
    "one micro-batch": (Case("vit", microbatches=1), 3, {"schedule": "zero_bubble"}),
    "more micro-batches": (Case(microbatches=8), 2, {"schedule": "zero_bubble", "stages_per_rank": 2}),
    "cut by hand": (Case(clip=0.1), 2, {"cut": ("twice",)}),
    "cut by cost": (Case(measured=True), 3, {}),
    "recomputed": (Case(clip=0.1, optimizer="adamw"), 3, {"recompute": True}),
    "recomputed, split": (Case("vit", precision="bf16"), 2, {"recompute": True, "schedule": "zero_bubble"}),
    "two pipelines": (Case(clip=0.1, ema=True), 4, {"replicate": 2}),
    "two pipelines, uneven": (Case(microbatches=3, samples=(11, 8, 1)), 4, {"replicate": 2, "schedule": "zero_bubble"}),
    "three pipelines of one": (Case(clip=0.1), 3, {"replicate": 3}),
    "resnet18": (Case("resnet18", samples=(7, 8), microbatches=3, size=32, clip=1.0), 2, {"schedule": "zero_bubble"}),
}


@cache
def alone(case_name: str) -> Trace:
    case = CASES[case_name][0] if case_name in CASES else Case(case_name, clip=0.1, samples=(11, 3))
    return own_trace(World(ALONE, torch.device("cpu")), case, None)


def assert_same(expected: Trace, size: int, case: Case, options: dict[str, Any]) -> None:
    told: Trace = {}
    for rank, trace in enumerate(worlds.run(size, own_trace, case, options)):
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


BEYOND = pytest.mark.extended("each schedule meets each model, and each model each of its sizes, in the gate")


@pytest.mark.worlds
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
    assert_same(alone(model), size, Case(model, clip=0.1, samples=(11, 3)), {"schedule": schedule})


@pytest.mark.worlds
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
    initial = pipeline_models.build(Case()).state_dict()
    _, state = going_on(World(ALONE, torch.device("cpu")), Case(), None, 0, None)
    still = {name for name, tensor in state.model.items() if torch.equal(tensor, initial[name])}
    assert still == {"twice.frozen", "twice.seen"}


# Pipelines that share an optimizer's work by rows: no rank can tell more than its part.
SHARED: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "one stage": (Case(clip=0.1, ema=True), 2, {"shard": 2}),
    "two stages": (Case(clip=0.1, ema=True, optimizer="adamw"), 4, {"shard": 2}),
    "lamb, uneven": (Case(microbatches=3, optimizer="lamb", clip=0.1, samples=(11, 8, 1)), 3, {"shard": 3}),
    "lars, split": (Case(optimizer="lars"), 4, {"shard": 2, "schedule": "zero_bubble"}),
    "groups": (Case(optimizer="nadamw", by_hand=GROUPS), 4, {"shard": 2, "schedule": "interleaved"}),
    "fp16, skipping": (Case(precision="fp16", initial_scale=2.0**20), 4, {"shard": 2}),
    "bf16-compute": (Case(precision="bf16-compute", clip=0.1, ema=True), 4, {"shard": 2}),
    "fp16-compute": (Case(precision="fp16-compute", clip=0.1, ema=True), 4, {"shard": 2}),
    "replicas too": (Case(clip=0.1, optimizer="lamb"), 4, {"replicate": 2, "shard": 2}),
    "of all kinds": (Case("mlp", optimizer="adamw", microbatches=8), 8, {"replicate": 2, "shard": 2}),
}


@cache
def whole_alone(name: str) -> Trace:
    return going_on(World(ALONE, torch.device("cpu")), SHARED[name][0], None, 0, None)[0]


@pytest.mark.worlds
@pytest.mark.parametrize("name", SHARED)
def test_pipelines_that_share_the_optimizer_give_the_bits_of_one_process(name: str) -> None:
    case, size, options = SHARED[name]
    for trace, _ in worlds.run(size, going_on, case, options, 0, None):
        assert trace == whole_alone(name)


@pytest.mark.worlds
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_goes_on_elsewhere(optimizer: str) -> None:
    """From a pipeline to two that share an optimizer, to one process, and back to another pipeline."""
    case = Case(optimizer=optimizer, ema=True, samples=(11, 8, 3, 8))
    world = World(ALONE, torch.device("cpu"))
    whole, _ = going_on(world, case, None, 0, None)
    first, state = worlds.run(3, going_on, replace(case, samples=(11,)), {"schedule": "1f1b"}, 0, None)[1]
    second, state = worlds.run(4, going_on, replace(case, samples=(11, 8)), {"shard": 2}, 1, state)[1]
    third, state = going_on(world, replace(case, samples=(11, 8, 3)), None, 2, state)
    for fourth, _ in worlds.run(2, going_on, case, {"schedule": "zero_bubble"}, 3, state):
        assert {**first, **second, **third, **fourth} == whole


def lying(world: World, case: Case, options: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Return how many elements lie here and in all, and which parameters have an optimizer's state here."""
    training, _ = pipeline_models.trained(world, case, options)
    state = training.state()
    shards: list[Any] = [*state.model.values()]
    here = [name for name, held in state.optimizer.items() if held.tensor.numel()]  # type: ignore[union-attr]
    training.close()
    return sum(s.tensor.numel() for s in shards), sum(s.shape.numel() for s in shards), here


@pytest.mark.worlds
def test_a_rank_holds_its_stages_alone() -> None:
    case = Case("mlp", samples=(8,))
    answers = worlds.run(3, lying, case, {})
    assert sum(here for here, _, _ in answers) == answers[0][1]
    assert all(0 < here < 0.8 * whole for here, whole, _ in answers)
    held = [name for _, _, names in answers for name in names]
    assert len(held) == len(set(held)) == len(pipeline_models.build(case).state_dict())


def optimizer_elements(world: World, case: Case, options: dict[str, Any]) -> tuple[int, int]:
    """Return how many elements of the optimizer's state lie here, and how many of those this rank is to tell."""
    training, _ = pipeline_models.trained(world, case, options)
    held: list[Any] = [*training.state().optimizer.values()]
    training.close()
    return sum(each.tensor.numel() for each in held), sum(each.tensor.numel() for each in held if each.primary)


@pytest.mark.worlds
def test_sharing_pipelines_cut_the_optimizer_s_state() -> None:
    case = Case("mlp", samples=(8,), optimizer="adamw")
    for options in ({"shard": 2}, {"replicate": 2}):
        answers = worlds.run(4, optimizer_elements, case, options)
        whole = sum(told for _, told in answers)
        assert whole == sum(here for here, _ in worlds.run(2, optimizer_elements, case, {}))
        assert sum(here for here, _ in answers) == pytest.approx(whole if "shard" in options else 2 * whole, rel=0.03)
