"""The recipes that are included in Lockstep. Each recipe has its own file, but all ImageNet models share a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Final

from lockstep.config.document import Document, Path, SourcePosition

_RECIPES: Final = FilePath(__file__).parent.parent / "recipes"
_FAMILY: Final = "imagenet"

# Maps the models that use recipes/imagenet.yaml to their source and description.
_MODELS: Final = {
    "botnet50": ("lockstep", "BoTNet-50 (attention in ResNet-50's last stage) on ImageNet."),
    "densenet121": ("torchvision", "DenseNet-121 on ImageNet."),
    "efficientnet_b0": ("timm", "EfficientNet-B0 on ImageNet."),
    "regnetx_160": ("timm", "RegNetX-16GF on ImageNet."),
    "regnety_160": ("timm", "RegNetY-16GF on ImageNet."),
    "regnety_320": ("timm", "RegNetY-32GF on ImageNet."),
    "resnet18": ("torchvision", "ResNet-18 on ImageNet."),
    "resnet50": ("torchvision", "ResNet-50 on ImageNet."),
}
_MODEL_OVERRIDES: Final[dict[str, dict[Path, Any]]] = {
    "efficientnet_b0": {("recipe", "optimizer", "weight_decay"): 1.0e-5}
}


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """A recipe that is included in Lockstep: its file, its description, and the values that override the file."""

    name: str
    file: FilePath
    description: str
    values: Mapping[Path, Any] = field(default_factory=dict)

    def apply_to(self, document: Document) -> Document:
        """Set the values of this recipe in the parsed document of its file, in place, and return the document.

        Error messages name the recipe as the source of these values.
        """
        for path, value in self.values.items():
            section = document.values
            for name in path[:-1]:
                section = section[name]
            section[path[-1]] = value
            document.positions[path] = SourcePosition(self.name)
        return document


def list_shipped_recipes() -> dict[str, ShippedRecipe]:
    """Return all shipped recipes as a dict from name to recipe, sorted by name."""
    files = [file for file in _RECIPES.glob("*.yaml") if file.stem != _FAMILY]
    recipes = [ShippedRecipe(file.stem, file, _read_description(file)) for file in files]
    for model, (source, description) in _MODELS.items():
        values = {("recipe", "model", "name"): model, ("recipe", "model", "source"): source}
        name, file = f"{_FAMILY}-{model}", _RECIPES / f"{_FAMILY}.yaml"
        recipes.append(ShippedRecipe(name, file, description, values | _MODEL_OVERRIDES.get(model, {})))
    return {recipe.name: recipe for recipe in sorted(recipes, key=lambda recipe: recipe.name)}


def _read_description(file: FilePath) -> str:
    """Return the description of a recipe, which is its first comment."""
    with file.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.startswith("#")), "")
