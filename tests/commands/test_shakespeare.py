"""The shipped language recipe has nanoGPT's sizes, and one hash on any number of processes."""

import pytest

pytestmark = pytest.mark.slow("runs whole commands")

SHORT = ("train", "shakespeare-gpt", "recipe.steps=2", "recipe.data.options.validation=0.001", "run.tensorboard=false")


def test_it_has_the_published_size_and_one_hash(run):
    one, three = (run(*SHORT, f"placement.processes={size}", f"run.dir=run-{size}") for size in (1, 3))
    assert "task language" in one.out
    assert (
        "804,096 parameters (3.07 MiB in fp32), 1,114,214 training samples, 18 validation samples" in one.out
    )  # 795,904 of no positions
    assert "evaluated 18 of 18" in one.out
    assert one.sha256 == three.sha256
