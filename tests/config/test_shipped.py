"""The recipes that come with Lockstep."""

from lockstep.config.load import load
from lockstep.config.shipped import list_shipped_recipes

NETS = "resnet18 resnet50 botnet50 densenet121 efficientnet_b0 regnetx_160 regnety_160 regnety_320"


def test_they_are_those_promised_in_the_order_of_their_names() -> None:
    names = {"digits", "cifar10-resnet18", "mnist1d", "shakespeare-gpt", *(f"imagenet-{net}" for net in NETS.split())}
    assert list(list_shipped_recipes()) == sorted(names)


def test_those_of_a_family_differ_by_the_model_and_what_goes_with_it() -> None:
    recipes = {net: load(f"imagenet-{net}").config.recipe for net in NETS.split()}
    assert {net: recipe.model.name for net, recipe in recipes.items()} == {net: net for net in NETS.split()}
    sources = {"lockstep": {"botnet50"}, "torchvision": {"densenet121", "resnet18", "resnet50"}}
    for net, recipe in recipes.items():
        assert recipe.model.source == next((each for each, nets in sources.items() if net in nets), "timm")
        assert recipe.optimizer.weight_decay == (1e-5 if net == "efficientnet_b0" else 5e-5)
        alike = {"model": recipes["resnet50"].model, "optimizer": recipes["resnet50"].optimizer}
        assert recipe.model_copy(update=alike) == recipes["resnet50"]


def test_a_value_of_one_recipe_comes_from_its_name_and_the_rest_from_the_file() -> None:
    origins = load("imagenet-resnet18", ["recipe.epochs=1"]).origins
    assert origins["recipe.model.name"] == origins["recipe.model.source"] == "imagenet-resnet18"
    assert origins["recipe.batch"].startswith("imagenet.yaml:")
    assert origins["recipe.epochs"] == "override"


def test_another_model_drops_the_source_of_the_recipes_own() -> None:
    loaded = load("imagenet-regnety_160", ["recipe.model.name=resnet50"])
    assert loaded.config.recipe.model.source == "auto"
    [note] = loaded.notes
    assert "source=timm (imagenet-regnety_160)" in note
