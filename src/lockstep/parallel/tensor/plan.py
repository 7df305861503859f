"""Tensor-parallel plans: which layers of a model to split into chunks, and how.

A plan maps patterns of module names (common/patterns.py) to kinds:

| kind | applies to | meaning |
|---|---|---|
| `colwise` | nn.Linear | split the outputs; `colwise:3` splits three concatenated outputs of the same size |
| `rowwise` | nn.Linear | split the inputs, and sum the outputs of the chunks |
| `heads:NAMES` | any | divide the attributes NAMES: the number of heads, or of the features of all heads |
| `shared` | any | use the module in each chunk, e.g. a norm of each head |
| `whole` | any | don't split: the module is only used before or after the split layers of a region |
| `experts` | any | parameters have one row per expert; `num_experts` or `experts:NAME` is the number of experts |
| `vocab` | nn.Embedding, nn.Linear | split the rows of an embedding, or of the head that returns the logits |
| `region:METHOD` | any | split the layers within this method, which must have no keyword arguments |

The region of a rowwise layer (parallel/tensor/chunks.py) is the smallest module that contains this layer and a colwise
layer. If this module has the kind `region:METHOD`, the region is only this method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final, NamedTuple, final

from torch import nn

from lockstep.common.names import format_suggestion
from lockstep.common.patterns import select_names
from lockstep.core.shard import ChunkLayout
from lockstep.core.work import find_divisors
from lockstep.errors import UsageError
from lockstep.parallel.tensor.chunks import Region
from lockstep.parallel.tensor.experts import Experts, takes_routed_rows
from lockstep.parallel.tensor.layers import ColumnLinear, RowLinear, share_parameters
from lockstep.parallel.tensor.vocab import ChunkedHead, ChunkedLookup

Plan = Mapping[str, str]
KINDS: Final = ("colwise", "rowwise", "heads", "shared", "experts", "vocab", "whole", "region")
_KEY: Final = "recipe.model.plan"
_MAX_SHOWN_CHUNKS: Final = 64  # maximum number of chunks suggested in a message


class _Kind(NamedTuple):
    """The kind of a module. For example, `colwise:3` has the label `colwise` and the argument `3`."""

    label: str
    argument: str


Kinds = Mapping[str, _Kind]  # by module name


class _RegionSpec(NamedTuple):
    """A module or a method that is computed chunk by chunk. `submodule_kinds` maps its submodules to their kinds."""

    name: str
    method: str
    submodule_kinds: Kinds

    def find_modules_of_kind(self, kind_name: str) -> list[tuple[str, str]]:
        """Return the name and the kind argument of each module in the region that has this kind."""
        return [(name, kind.argument) for name, kind in self.submodule_kinds.items() if kind.label == kind_name]


def split_into_chunks(model: nn.Module, plan: Plan, num_chunks: int) -> dict[str, ChunkLayout]:
    """Split the layers of a plan into `num_chunks` chunks, in place.

    Returns how each rearranged parameter is chunked, by name. Raises UsageError if a layer can't be split.
    """
    kinds = _resolve_kinds(model, plan)
    regions = [_find_region(model, name, kinds) for name, kind in kinds.items() if kind.label == "rowwise"]
    names_in_regions = {name for region in regions for name in (region.name, *region.submodule_kinds)}
    for name, kind in kinds.items():
        if kind.label not in ("experts", "vocab", "whole") and name not in names_in_regions:
            raise UsageError(
                f"{_KEY}: {name} is set to {kind.label}, but its module has no rowwise layer; add one to the plan, or "
                f"set {name} to whole"
            )
        if kind.label == "heads":
            for attribute in kind.argument.split(","):
                _divide_attribute(model.get_submodule(name), name, attribute, num_chunks)
    _check_untied(model, kinds)
    chunked: dict[str, ChunkLayout] = {}
    for region in regions:
        chunked |= _split_region(model, region, num_chunks)
    for name, kind in kinds.items():
        if kind.label == "experts":
            _split_experts(model.get_submodule(name), name, kind.argument or "num_experts", num_chunks)
        if kind.label == "vocab":
            _split_rows(model.get_submodule(name), name, num_chunks)
    chunked_by_parameter = {model.get_parameter(name): layout for name, layout in chunked.items()}
    named_parameters = model.named_parameters(remove_duplicate=False)  # a module can have several names
    return {
        name: chunked_by_parameter[parameter]
        for name, parameter in named_parameters
        if parameter in chunked_by_parameter
    }


def find_region_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the modules that are computed chunk by chunk, or that have a method that is."""
    names = []
    for name, module in model.named_modules():
        hooks = (*module._forward_pre_hooks.values(), *vars(module).values())
        if any(isinstance(hook, _RegionHook | _RegionMethod | Experts | ChunkedLookup | ChunkedHead) for hook in hooks):
            names.append(name)
    return frozenset(names)


def _check_untied(model: nn.Module, kinds: Kinds) -> None:
    """Raise UsageError if a split layer shares a parameter with another layer, unless both are split by rows."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in {*module.parameters(recurse=False)}:
            owners.setdefault(parameter, []).append(name)
    by_rows = {name for name, kind in kinds.items() if kind.label == "vocab"}
    for name in [name for name, kind in kinds.items() if kind.label in ("colwise", "rowwise", "vocab")]:
        for parameter in model.get_submodule(name).parameters():
            sharers = [sharer for sharer in owners[parameter] if sharer != name]
            if name in by_rows and (
                foreign_sharer := next((sharer for sharer in sharers if sharer not in by_rows), None)
            ):
                raise UsageError(
                    f"{_KEY}: {name} is set to vocab, but shares a weight with {foreign_sharer}; set both to vocab, or "
                    f"untie them"
                )
            if name not in by_rows and sharers:
                raise UsageError(
                    f"{_KEY}: {name} shares a weight with {sharers[0]}, so it cannot be split; set {name} to whole, or "
                    f"untie them"
                )


def _resolve_kinds(model: nn.Module, plan: Plan) -> Kinds:
    """Return the kind of each module that the plan matches. If several patterns match a module, the first applies.

    Raises UsageError for unknown kinds and for patterns that match no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern, kind in plan.items():
        if kind.partition(":")[0] not in KINDS:
            hint = format_suggestion(kind, KINDS) or f"; use one of {', '.join(KINDS)}"
            raise UsageError(f"{_KEY}: {pattern}: unknown kind {kind!r}{hint}")
        select_names(_KEY, [pattern], names, "module")
    kind_by_name = {
        name: next((kind for pattern, kind in plan.items() if fnmatchcase(name, pattern)), "") for name in names
    }
    return {name: _Kind(*kind.partition(":")[::2]) for name, kind in kind_by_name.items() if kind}


def _find_region(model: nn.Module, rowwise_name: str, kinds: Kinds) -> _RegionSpec:
    """Return the region of the rowwise layer `rowwise_name`: its innermost parent module with a colwise layer."""
    for name in _iterate_parents(rowwise_name):
        prefix = f"{name}." if name else ""
        inside = {path: kind for path, kind in kinds.items() if path.startswith(prefix)}
        region_kind = kinds.get(name)
        if region_kind is not None and region_kind.label == "region":
            # Only consider direct children, because it isn't known which other modules the method calls.
            inside = {path: kind for path, kind in inside.items() if "." not in path.removeprefix(prefix)}
            if not callable(getattr(model.get_submodule(name), region_kind.argument, None)):
                raise UsageError(
                    f"{_KEY}: {name} is set to region:{region_kind.argument}, but has no such method; use the name of "
                    f"a method of this module"
                )
            if any(kind.label == "colwise" for kind in inside.values()):
                return _RegionSpec(name, region_kind.argument, inside)
            continue
        if any(kind.label == "colwise" for kind in inside.values()):
            if sum(kind.label == "rowwise" for kind in inside.values()) > 1:
                raise UsageError(
                    f"{_KEY}: {name or 'the model'} has several rowwise layers; move each one, with the colwise layers "
                    f"before it, to a separate module"
                )
            _check_covered(model, name, inside)
            return _RegionSpec(name, "", inside)
    raise UsageError(
        f"{_KEY}: {rowwise_name} is set to rowwise, but no module contains both it and a colwise layer; add a colwise "
        f"layer to the plan, or set {rowwise_name} to whole"
    )


def _iterate_parents(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _check_covered(model: nn.Module, name: str, submodule_kinds: Kinds) -> None:
    """Raise UsageError if the plan doesn't cover a parameter of the region.

    Otherwise, the gradients of this parameter wouldn't be summed over the chunks.
    """
    for path, _ in model.get_submodule(name).named_parameters():
        owner = f"{name}.{path}".removeprefix(".").rpartition(".")[0]
        if not any(owner == planned or owner.startswith(f"{planned}.") for planned in submodule_kinds):
            raise UsageError(
                f"{_KEY}: {name or 'the model'} is split, but the plan does not cover its parameter {path}; set the "
                f"module of {path} to shared (each chunk uses it) or whole (used before or after the split layers)"
            )


def _split_region(model: nn.Module, spec: _RegionSpec, num_chunks: int) -> dict[str, ChunkLayout]:
    region = Region(num_chunks, spec.name or "the model")
    module = model.get_submodule(spec.name)
    chunked: dict[str, ChunkLayout] = {}
    for name, parts_text in spec.find_modules_of_kind("colwise"):
        layer, head_dim = _get_linear(model, name, "colwise"), vars(module).get("head_dim", 1)
        chunked |= _replace_layer(
            model, name, _split_outputs(layer, name, _parse_output_count(name, parts_text), head_dim, region)
        )
    for name, _ in spec.find_modules_of_kind("rowwise"):
        chunked |= _replace_layer(model, name, _split_inputs(_get_linear(model, name, "rowwise"), name, region))
    for name, _ in spec.find_modules_of_kind("shared"):
        _share_module_parameters(model.get_submodule(name), name, region)
    if spec.method:
        setattr(module, spec.method, _RegionMethod(getattr(module, spec.method), region))
    else:
        module.register_forward_pre_hook(_RegionHook(region), with_kwargs=True)
    return chunked


@final
@dataclass(frozen=True)
class _RegionHook:
    """A forward pre-hook that calls a module for all chunks of this rank except the last."""

    region: Region

    def __call__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.region.call_for_earlier_chunks(partial(module.forward, *args, **kwargs))


@final
@dataclass(frozen=True)
class _RegionMethod:
    """Replaces a method. Calls the original method for each chunk of this rank."""

    method: Callable[..., Any]
    region: Region

    def __call__(self, *arguments: Any) -> Any:
        self.region.call_for_earlier_chunks(partial(self.method, *arguments))
        return self.method(*arguments)


def _split_experts(module: nn.Module, name: str, attribute: str, num_chunks: int) -> None:
    """Split the experts of `module` into `num_chunks` groups. Keeps the order, so no parameter is rearranged."""
    if not takes_routed_rows(module):
        raise UsageError(
            f"{_KEY}: {name} is set to experts, but its forward does not take exactly three arguments; let it take "
            f"rows [n, d], expert indices [n, k] and weights [n, k]"
        )
    if any(path.count(".") for path, _ in module.named_parameters()):
        raise UsageError(
            f"{_KEY}: {name} is set to experts, but has submodules with parameters; store the experts as rows of the "
            f"module's own parameters, or set {name} to whole"
        )
    _divide_attribute(module, name, attribute, num_chunks)
    group_size: int = vars(module)[attribute]
    for key, parameter in module.named_parameters():
        if not parameter.ndim or parameter.shape[0] != group_size * num_chunks:
            raise UsageError(
                f"{_KEY}: {name} is set to experts with {attribute}={group_size * num_chunks}, but its parameter {key} "
                f"has shape {[*parameter.shape]}; use one row of dim 0 for each expert"
            )
    # Replace the method instead of the module, so that parameter names don't change.
    module.forward = Experts(module, Region(num_chunks, name), group_size)


def _split_rows(module: nn.Module, name: str, num_chunks: int) -> None:
    """Split an embedding or a head into `num_chunks` chunks of rows. Keeps the row order."""
    forward: ChunkedLookup | ChunkedHead
    if type(module) is nn.Embedding:
        forward = ChunkedLookup(module, Region(num_chunks, name))
        if unsupported := [key for key in ("max_norm", "scale_grad_by_freq", "sparse") if vars(module)[key]]:
            raise UsageError(
                f"{_KEY}: {name} is set to vocab, but uses {unsupported[0]}, which requires all rows; remove "
                f"{unsupported[0]}"
            )
    elif type(module) is nn.Linear:
        forward = ChunkedHead(module, Region(num_chunks, name))
    else:
        raise UsageError(
            f"{_KEY}: {name} is a {type(module).__name__}, but vocab requires an nn.Embedding, or an nn.Linear whose "
            f"outputs are used by a cross entropy; set {name} to whole"
        )
    if forward.num_rows < num_chunks:
        raise UsageError(
            f"recipe.model.chunks: {name} has {forward.num_rows} rows, fewer than {num_chunks} chunks; use fewer "
            f"chunks, or set {name} to whole in {_KEY}"
        )
    # Replace the method instead of the module, to keep the class of the module and tied weights.
    module.forward = forward  # type: ignore[method-assign,assignment]


def _parse_output_count(module_name: str, argument: str) -> int:
    if argument and not (argument.isdecimal() and int(argument)):
        raise UsageError(
            f"{_KEY}: {module_name} is set to colwise:{argument}, expected the number of concatenated outputs; use "
            "e.g. colwise:3"
        )
    return int(argument or 1)


def _share_module_parameters(module: nn.Module, module_name: str, region: Region) -> None:
    own_parameters, all_parameters = list(module.parameters(recurse=False)), list(module.parameters())
    if len(own_parameters) < len(all_parameters):
        raise UsageError(
            f"{_KEY}: {module_name} is set to shared, but has submodules with parameters; set these to shared instead"
        )
    if own_parameters:
        share_parameters(module, region)


def _divide_attribute(module: nn.Module, module_name: str, attribute_name: str, num_chunks: int) -> None:
    number = vars(module).get(attribute_name)
    if not isinstance(number, int):
        raise UsageError(
            f"{_KEY}: {module_name} has no integer attribute {attribute_name!r}; use the name of such an attribute"
        )
    if number % num_chunks:
        raise _make_indivisible_error(num_chunks, f"{module_name}.{attribute_name} = {number}", number)
    setattr(module, attribute_name, number // num_chunks)


def _get_linear(model: nn.Module, module_name: str, kind: str) -> nn.Linear:
    module = model.get_submodule(module_name)
    if type(module) is not nn.Linear:
        raise UsageError(
            f"{_KEY}: {module_name} is a {type(module).__name__}, but {kind} requires an nn.Linear; set {module_name} "
            "to whole"
        )
    return module


SplitResult = tuple[ColumnLinear | RowLinear, dict[str, ChunkLayout]]


def _split_outputs(layer: nn.Linear, name: str, num_parts: int, head_dim: int, region: Region) -> SplitResult:
    """Split the outputs of `layer` into chunks. Returns the split layer and how its parameters are chunked.

    The outputs are the concatenation of `num_parts` equal parts, such as queries, keys and values. Each chunk contains
    whole heads of `head_dim` outputs.
    """
    outputs, inputs, count = layer.out_features, layer.in_features, region.num_chunks
    length = outputs // num_parts
    if outputs % num_parts or length % (count * head_dim):
        size_text = f"{length} outputs" if head_dim == 1 else f"{length // head_dim} heads"
        raise _make_indivisible_error(
            count, f"the {f'{num_parts} x ' if num_parts > 1 else ''}{size_text} of {name}", length // head_dim
        )
    chunked = {"weight": ChunkLayout((outputs, inputs), (num_parts, count, length // count, inputs), 1)}
    weight, bias = chunked["weight"].to_rows(layer.weight.detach()), None
    if layer.bias is not None:
        chunked["bias"] = ChunkLayout((outputs,), (num_parts, count, length // count), 1)
        bias = chunked["bias"].to_rows(layer.bias.detach())
    return ColumnLinear(weight, bias, region), chunked


def _split_inputs(layer: nn.Linear, name: str, region: Region) -> SplitResult:
    outputs, inputs, count = layer.out_features, layer.in_features, region.num_chunks
    if inputs % count:
        raise _make_indivisible_error(count, f"the {inputs} inputs of {name}", inputs)
    chunked = ChunkLayout((outputs, inputs), (outputs, count, inputs // count), 1)
    bias = None if layer.bias is None else layer.bias.detach()
    return RowLinear(chunked.to_rows(layer.weight.detach()), bias, region), {"weight": chunked}


def _replace_layer(model: nn.Module, name: str, split_result: SplitResult) -> dict[str, ChunkLayout]:
    layer, chunked_by_key = split_result
    replaced = model.get_submodule(name)
    layer.train(replaced.training)
    for key, parameter in replaced.named_parameters():
        getattr(layer, key).requires_grad_(parameter.requires_grad)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
    return {f"{name}.{key}": chunked for key, chunked in chunked_by_key.items()}


def _make_indivisible_error(num_chunks: int, subject: str, size: int) -> UsageError:
    divisors_text = ", ".join(str(divisor) for divisor in find_divisors(size) if 1 < divisor <= _MAX_SHOWN_CHUNKS)
    return UsageError(f"recipe.model.chunks: {num_chunks} does not divide {subject}; use {divisors_text or 1}")
