"""A loop of one's own and a recipe in workers of Ray Train, each on a raylet of its own: the weights of one process."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from component import require_package, script

pytestmark = [
    pytest.mark.slow("other programs, or minutes"),
    pytest.mark.cluster,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def prove() -> Any:
    return script("prove-ray")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, prove: Any) -> Path:
    """Return a folder with the script of docs/own-loop.md, loop.py."""
    folder = tmp_path_factory.mktemp("ray")
    prove.write_loop(folder)
    return folder


@pytest.fixture(scope="module")
def nodes(prove: Any) -> Iterator[Any]:
    require_package("ray")
    with prove.cluster(2) as found:
        yield found


def test_a_loop_whose_worker_is_killed_resumes_to_the_weights_of_one_process(
    prove: Any, place: Path, nodes: Any
) -> None:
    run = place / "ray" / "killed" / "runs" / "a"
    prove.after_save(run, nodes.kill_worker)
    result = prove.by_loop(place, "killed", 2, pace=0.02)
    assert result.metrics["weights_sha256"] == prove.on_one_process(place, ["loop.py"])
    assert result.metrics["step"] == 30
    assert result.metrics["accuracy"] > 0.5
    assert [each["processes"] for each in prove.events(run) if each["event"] == "started"] == [2, 2]
    with result.checkpoint.as_directory() as folder:
        assert json.loads((Path(folder) / "lockstep.json").read_text()) == {"run_dir": str(run)}


@pytest.mark.slow("a loop joins as a recipe does; scripts/prove-ray runs both")
def test_a_recipe_has_the_weights_of_one_process(prove: Any, place: Path, nodes: Any) -> None:
    words = ["-m", "lockstep", "train", "digits", "placement.processes=1", "run.dir=plain"]
    words += [f"{key}={value}" for key, value in prove.DIGITS.items()]
    result = prove.by_recipe(place, "recipe", 2)
    assert result.metrics["weights_sha256"] == prove.on_one_process(place, words)
    assert Path(result.metrics["run_dir"]) == Path(result.path) / "run"


def failing(config: dict[str, Any]) -> None:
    import ray.train

    import lockstep

    rank = ray.train.get_context().get_world_rank()
    run = lockstep.join(seed=rank if config["differ"] else 0)
    if run.rank == 1:
        raise ValueError("the data are gone")
    time.sleep(60)  # Ray ends it for the error of the other


@pytest.mark.slow("two starts of a minute each")
@pytest.mark.parametrize(
    ("differ", "text"), [(False, "ValueError: the data are gone"), (True, "seed: rank 1 .* differs from rank 0")]
)
def test_an_error_reaches_ray_as_an_exception(differ: bool, text: str, place: Path, nodes: Any, prove: Any) -> None:
    from ray import cloudpickle
    from ray.train import ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = {"train_loop_config": {"differ": differ}, "scaling_config": ScalingConfig(num_workers=2)}
    with pytest.raises(TrainingFailedError, match=text):
        TorchTrainer(failing, **config).fit()
