"""An engine reads the recipe itself, and knows which share of a step is its own."""

from dataclasses import replace

from lockstep.config.load import load
from lockstep.core.engine_recipe import PlainEma, PlainRecipe
from lockstep.parallel.numerics import Numerics


def test_a_recipe_is_read_by_its_own_keys() -> None:
    changes = ["recipe.microbatches=3", "recipe.batch=32", "recipe.nonfinite=skip", "recipe.ema.decay=0.5"]
    recipe = load("digits", [*changes, "recipe.memory_format=channels_last", "recipe.seed=4"]).config.recipe
    numerics = Numerics(recipe)
    assert numerics.recipe is recipe
    assert (numerics.num_microbatches, numerics.largest_microbatch_size, numerics.seed) == (3, 11, 4)
    assert (numerics.ema_decay, numerics.skip_nonfinite, numerics.channels_last) == (0.5, True, True)


def test_the_defaults_of_a_plain_recipe_are_those_of_a_recipe() -> None:
    """`digits` has a few of its own, which are left out."""
    recipe, plain = load("digits", ["recipe.clip_norm=", "recipe.seed=0"]).config.recipe, PlainRecipe(1)
    for key in ("seed", "precision", "nonfinite", "clip_norm", "ema", "memory_format", "compile", "batchnorm"):
        assert getattr(plain, key) == getattr(recipe, key), key
    assert vars(plain.loss_scale) == dict(recipe.loss_scale)
    assert plain.model.sequence_chunks == recipe.model.sequence_chunks


def test_peers_share_the_micro_batches_of_a_step_and_have_seeds_of_their_own() -> None:
    whole = Numerics(PlainRecipe(7, seed=5))
    peers = [replace(whole, num_peers=3, peer_index=number) for number in range(3)]
    assert sum(each.num_microbatches for each in peers) == whole.num_microbatches == 7
    assert [each.seed for each in peers] == [5, 6, 7]


def test_an_engine_may_leave_out_the_average_of_the_recipe() -> None:
    numerics = Numerics(PlainRecipe(1, ema=PlainEma(0.9)))
    assert numerics.ema_decay == 0.9
    assert replace(numerics, averages_weights=False).ema_decay is None
