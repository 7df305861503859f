"""Built-in plans: by module class for timm and Lockstep, and converted from the model's plan for transformers."""

from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from lockstep.parallel.tensor.experts import takes_routed_rows

# The kinds of the layers of each module class, by name within the module. The name "" is the module itself.
_MODULES: Final = {
    "timm.layers.attention.Attention": {
        "": "heads:num_heads,attn_dim",
        "qkv": "colwise:3",
        "gate": "colwise",
        "q_norm": "shared",
        "k_norm": "shared",
        "proj": "rowwise",
    },
    "timm.layers.mlp.Mlp": {"fc1": "colwise", "fc2": "rowwise"},
    "lockstep.models.gpt.Attention": {"": "heads:heads", "queries_keys_values": "colwise:3", "out": "rowwise"},
    "lockstep.models.gpt.Block": {"": "region:feed_forward", "up": "colwise", "down": "rowwise"},
}
# The supported kinds in transformers plans and their Lockstep kinds. Groups that contain any other kind aren't split.
_KINDS: Final = {"colwise": "colwise", "rowwise": "rowwise", "replicated_with_grad_allreduce": "shared"}


def get_built_in_plan(model: nn.Module) -> dict[str, str]:
    """Return the kind of each layer that the built-in plan of a model splits, by module name. Can be empty."""
    plan = {}
    for name, module in model.named_modules():
        for layer, kind in _MODULES.get(f"{type(module).__module__}.{type(module).__qualname__}", {}).items():
            if not layer or isinstance(getattr(module, layer), nn.Module):
                plan[".".join(filter(None, (name, layer)))] = kind
    return plan | _convert_transformers_plan(model)


def _convert_transformers_plan(model: nn.Module) -> dict[str, str]:
    """Convert the plan of a transformers model. Skips groups of modules that contain an unsupported kind."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix_dot = f"{prefix}." if prefix and prefix in dict(model.named_children()) else ""
    groups: dict[str, dict[str, str]] = {}
    for name, _ in model.named_modules():
        kind = next((kind for pattern, kind in plan.items() if fnmatchcase(name, f"{prefix_dot}{pattern}")), None)
        if kind is not None:
            groups.setdefault(name.rpartition(".")[0], {})[name] = kind
    experts = {
        name: "experts" for group in groups.values() for name in group if _is_expert_module(model, name, group[name])
    }
    usable = [group for group in groups.values() if {"colwise", "rowwise"} <= {*group.values()} <= {*_KINDS}]
    return experts | {name: _KINDS[kind] for group in usable for name, kind in group.items()}


def _is_expert_module(model: nn.Module, name: str, kind: str) -> bool:
    return kind == "moe_tp_experts" and takes_routed_rows(model.get_submodule(name))
