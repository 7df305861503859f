"""What is used of torch that no release promises to keep, each with its reason and the test that fails without it.

A name is private where a part of it begins with an underscore. Of attributes only the name is seen, not what they are
of: those that a class of ours has too are looked for where it stands in RECORDS.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

import lockstep

TESTS: Final = Path(__file__).parent
SRC: Final = Path(lockstep.__file__).parent
MODULES: Final = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))]

# Private names of torch and torchvision: what they are used for, and the file of tests that goes through that use.
INTERNALS: Final[dict[str, tuple[str, str]]] = {
    # Autograd
    "torch._C._autograd._get_sequence_nr": ("the order of nodes in a backward", "parallel/test_cooperative.py"),
    "torch.autograd.graph._engine_run_backward": ("a backward whose seeds fit", "parallel/test_same_bits.py"),
    "_sequence_nr": ("the same of a node", "models/test_operations.py"),
    "_input_metadata": ("shape and dtype of the gradients that a node takes", "models/test_operations.py"),
    "_saved_reduction": ("whether a loss is a mean", "run/test_run_own_loss.py"),
    "_saved_dim": ("what a loss is a mean of", "run/test_run_own_loss.py"),
    "_saved_other": ("what a loss is divided by", "run/test_run_own_loss.py"),
    "_saved_self": ("what a loss is divided by", "run/test_run_own_loss.py"),
    "_saved_self_sym_sizes": ("what a loss is a mean of", "run/test_run_own_loss.py"),
    "_saved_total_weight": ("what a weighted loss is divided by", "run/test_run_own_loss.py"),
    "torch._C._current_graph_task_id": ("whether a backward is under way", "run/test_own_gradient.py"),
    "torch._C.TensorBase": ("`data` as torch has it", "run/test_own_guard.py"),
    "_post_accumulate_grad_hooks": ("hooks of the user's parameters", "run/test_own_guard.py"),
    "_optimizer_step_pre_hooks": ("hooks of the user's optimizer", "run/test_own_guard.py"),
    "_optimizer_step_post_hooks": ("hooks of the user's optimizer", "run/test_own_guard.py"),
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": (
        "running statistics are put back between a forward and its backward",
        "parallel/pipeline/test_pipeline_engine.py",
    ),
    "_is_view": ("fully_shard loses its hook of an output that is a view", "parallel/test_same_bits.py"),
    "_new_with_weak_ptr": ("storages are known without being kept", "parallel/test_activations.py"),
    "_backward_hooks": ("copies of parameters have no hooks", "parallel/test_apart.py"),
    # Modules and optimizers
    "torch.nn.modules.batchnorm._BatchNorm": ("all kinds of BatchNorm", "parallel/test_batchnorm.py"),
    "_BatchNorm": ("the same", "parallel/test_batchnorm.py"),
    "_NormBase": ("InstanceNorm too", "parallel/test_batchnorm.py"),
    "_SpectralNorm": ("it moves in a forward", "commands/test_verify_probe.py"),
    "_parameters": ("what a module holds", "parallel/test_apart.py"),
    "_buffers": ("what a module holds", "commands/test_verify_probe.py"),
    "_modules": ("what a module holds", "commands/test_verify_probe.py"),
    "_non_persistent_buffers_set": ("buffers that no state has", "parallel/pipeline/test_pipeline_state.py"),
    "_compiled_call_impl": ("a call of the user's model, around its hooks", "run/test_joined.py"),
    "_call_impl": ("the same", "run/test_joined.py"),
    "_forward_hooks": ("what of a user's module is no function of its input", "commands/test_first_look.py"),
    "_forward_pre_hooks": ("the same", "commands/test_first_look.py"),
    "_apply": ("a model is moved to fake tensors", "models/test_operations.py"),
    "_found_inf_per_device": ("the loss scale, which ranks agree on", "parallel/test_optimizer_step.py"),
    "_per_optimizer_states": ("the same", "parallel/test_optimizer_step.py"),
    "_unscale_grads_": ("the same", "parallel/test_optimizer_step.py"),
    "_growth_tracker": ("steps since the loss scale grew, in checkpoints", "commands/test_resume.py"),
    # Operations on lists of tensors, which torch's own optimizers use
    "torch._foreach_add": ("one call for many tensors", "parallel/test_layerwise.py"),
    "torch._foreach_add_": ("one call for many tensors", "parallel/test_gradients.py"),
    "torch._foreach_addcmul_": ("one call for many tensors", "parallel/test_layerwise.py"),
    "torch._foreach_copy_": ("one call for many tensors", "parallel/test_weights.py"),
    "torch._foreach_div": ("one call for many tensors", "parallel/test_layerwise.py"),
    "torch._foreach_div_": ("one call for many tensors", "parallel/test_layerwise.py"),
    "torch._foreach_lerp_": ("one call for many tensors", "parallel/test_ema.py"),
    "torch._foreach_mul_": ("one call for many tensors", "parallel/test_layerwise.py"),
    "torch._foreach_sqrt": ("one call for many tensors", "parallel/test_layerwise.py"),
    "_foreach_add": ("its rounding does not depend on where vectors end", "parallel/test_narrow_steps.py"),
    "_foreach_add_": ("its rounding does not depend on where vectors end", "parallel/test_narrow_steps.py"),
    "torch._assert_async": ("an index is checked without waiting for a GPU", "parallel/tensor/test_vocab.py"),
    # Tensors without memory, operations as they are called, trees
    "torch._ops.OpOverload": ("which operation is called", "models/test_operations.py"),
    "_schema": ("the name and arguments of an operation", "models/test_operations.py"),
    "torch._subclasses.fake_tensor": ("no memory of a card is taken", "models/test_operations.py"),
    "torch._subclasses.fake_tensor.FakeTensor": ("shapes without values", "parallel/pipeline/test_pipeline_cut.py"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("shapes without values", "parallel/pipeline/test_pipeline_cut.py"),
    "torch.utils._python_dispatch.TorchDispatchMode": ("operations are seen as they run", "models/test_operations.py"),
    "_make_wrapper_subclass": ("logits that are in pieces", "parallel/tensor/test_logits.py"),
    "torch.utils._pytree": ("structures of tensors", "core/test_core_batch.py"),
    "torch.utils._pytree.tree_flatten": ("structures of tensors", "parallel/test_same_bits.py"),
    "torch.utils._pytree.tree_leaves": ("structures of tensors", "parallel/test_same_bits.py"),
    "torch.utils._pytree.tree_map_only": ("structures of tensors", "parallel/test_same_bits.py"),
    "torch.utils._pytree.tree_unflatten": ("structures of tensors", "parallel/test_same_bits.py"),
    # torch.compile
    "torch._dynamo.config": ("nothing that is timed decides", "device/test_compiler.py"),
    "torch._functorch.config": ("nothing that is timed decides", "device/test_compiler.py"),
    "torch._inductor.config": ("nothing that is timed decides", "device/test_compiler.py"),
    "torch._inductor.runtime.cache_dir_utils.cache_dir": ("one cache for each machine", "device/test_compiler.py"),
    "torch._dynamo.exc.FailOnRecompileLimitHit": ("an error that names the block", "parallel/test_compiled.py"),
    "torch._dynamo.exc.TorchDynamoException": ("an error that names the block", "parallel/test_compiled.py"),
    "_tensor_constant": ("a trace that has kept a value", "parallel/pipeline/test_pipeline_cut.py"),
    # torch.distributed
    "torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter": (
        "fully_shard hands its gradients to the canonical sum",
        "parallel/test_same_bits.py",
    ),
    "_local_tensor": ("this rank's rows of a DTensor", "parallel/test_same_bits.py"),
    "torch.distributed.fsdp._fully_shard._fsdp_api.AllGather": (
        "units are gathered in one order",
        "parallel/test_same_bits.py",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather": (
        "as this torch gathers",
        "comm/test_gathers.py",
    ),
    "_get_fsdp_state": ("zeros for what is not used", "parallel/test_same_bits.py"),
    "_fsdp_param_group": ("zeros for what is not used", "parallel/test_same_bits.py"),
    "_backward_prefetch": ("units are gathered in one order", "parallel/test_same_bits.py"),
    "_prefetch_unshard": ("units are gathered in one order", "parallel/test_same_bits.py"),
    "_module_info": ("before torch 2.15", "parallel/test_same_bits.py"),
    "_unsharded_param": ("zeros for what is not used", "parallel/test_same_bits.py"),
    "torch.distributed.pipelining._backward": (
        "which part of a backward only weights need",
        "parallel/pipeline/test_pipeline_stage.py",
    ),
    "torch.distributed._functional_collectives": ("exchanges of others are seen", "comm/test_exchanges.py"),
    "_rank_not_in_group": ("exchanges of others are seen", "comm/test_exchanges.py"),
    "_get_default_group": ("exchanges of others are seen", "comm/test_exchanges.py"),
    "_resolve_group": ("exchanges of others are seen", "comm/test_exchanges.py"),
    "_resolve_group_name": ("exchanges of others are seen, before torch 2.12", "comm/test_exchanges.py"),
    "torch._C._distributed_c10d": ("the flight recorder", "commands/test_stalls.py"),
    "_dump_fr_trace_json": ("the flight recorder", "commands/test_stalls.py"),
    "_dump_nccl_trace_json": ("the flight recorder of GPUs", "commands/test_stalls.py"),
    "torch._C._distributed_c10d.Store": ("a type for the type checker", "ranks/test_rendezvous.py"),
    "torch.testing._internal.distributed.fake_pg.FakeStore": ("many ranks, in one process", "device/test_pretended.py"),
    # The loader
    "_shutdown_workers": ("workers end with their epoch", "data/test_loader.py"),
}
# Of other libraries, and words that are no names of theirs.
OTHERS: Final = {
    *("_asdict", "_current_frames", "_exit", "_fields", "_getframe"),  # Python
    *("_hp_mapping", "_reassign_or_swap_out_partitioned_parameters"),  # DeepSpeed
    "_model_mapping",  # transformers
    *("_32x4d", "_EnterBackward", "_dir", "_get_", "_hooks", "_hooks_", "_snapshot", "_test"),
}
# What modules of torch keep by these names, in strings or of another object than self.
RECORDS: Final = {"_parameters", "_buffers", "_modules"}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@cache
def _ours() -> frozenset[str]:
    """Return what our own modules and classes define by private names."""
    found = set()
    for node in (node for module in MODULES for node in ast.walk(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return frozenset(found - RECORDS)


def _used(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if _of_torch(each.name))
            case ast.ImportFrom(module=str(place), names=names) if _of_torch(place):
                yield from (f"{place}.{each.name}" for each in names)
            case ast.Attribute() if _of_torch(_dotted(node)):
                yield _dotted(node)
            case ast.Attribute(attr=name, value=ast.Name(id="self")):
                pass
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if name.isidentifier():
                yield name if name.startswith("_") and name not in _ours() | OTHERS else ""


def _dotted(node: ast.expr) -> str:
    """Return a name and what is after its dots, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := _dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def _of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "torchvision")


def used() -> set[str]:
    """Return the private names of torch that our modules use, each as far as it is written."""
    found = {name for module in MODULES for name in _used(module) if name and _is_private(name)}
    found = {name for name in found if not name.startswith("__")}
    # `torch._C` and `torch._C._autograd` are only the way to what is used of them.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found) or name in INTERNALS}


def test_what_is_used_of_torch_without_a_promise_is_listed() -> None:
    assert used() == INTERNALS.keys()


@pytest.mark.parametrize("name", INTERNALS)
def test_each_names_the_tests_that_fail_without_it(name: str) -> None:
    reason, tests = INTERNALS[name]
    assert reason
    assert (TESTS / tests).is_file()
