"""Each module of src has its tests where it stands: src/lockstep/a/b.py in tests/a/test_b.py.

Where another room has a test of that name, the room comes before it: tests/a/test_a_b.py.
"""

from pathlib import Path
from typing import Final

import pytest

import lockstep

TESTS: Final = Path(__file__).parent
SRC: Final = Path(lockstep.__file__).parent
MODULES: Final = sorted(path.relative_to(SRC) for path in SRC.rglob("*.py") if path.name != "__init__.py")

# A test of another name, and the modules whose tests it has: it calls nearly all of their functions, for all at once.
TOGETHER: Final[dict[str, str]] = {
    "config/test_load.py": "config: across base placement recipe run schema wording",
    "data/test_imported.py": "data: collate own_split\ndata/images: leaves",
    "data/images/test_folder.py": "data/images: pictures",
    "data/images/test_scan.py": "data/images: listing",
    "data/images/test_webdataset.py": "data/images: tar_index",
    "data/tables/test_table.py": "data/tables: columns files rows",
    "data/text/test_text_files.py": "data/text: tokenizer",
    "commands/test_doctor.py": "run: launch_report",
    "commands/test_doctor_gpu.py": "run: gpu_report",
    "parallel/pipeline/test_pipeline_cut.py": "parallel/pipeline: part watch",
    "strategies/test_strategies.py": "strategies: ddp hsdp single zero1 zero2 zero3",
    "launchers/test_detect.py": "launchers: environment horovodrun mpich openmpi slurm torchrun variables",
    "launchers/test_command.py": "launchers: job local ssh",
}
# Their tests stand elsewhere, or they have none of their own: to become fewer.
NOT_YET: Final = """
.: __main__
comm: fsdp
config: recorded
core: order_name
data: base items
data/images: device_transforms words
device: kernels
launchers: agents base
models: tuned
parallel: engine numerics
parallel/layouts: base replicated sharded
parallel/pipeline: ghost layout loans replay trace
ranks: flight heartbeat member status
reporting: mlflow_sink progress sink wandb_sink
run: adapters ambient aside build compared computing continued engine evaluation events examples facts finished folder
run: launching membership optimizing own_model own_step own_sums placing plain rank_training resume schedule script
run: session sinks start strategy training user_code user_source watching
strategies: base
tasks: base own_loss
training: events
training/checkpoint: saved_state
verification: cases causes compare first_look probe probe_state probe_witness probing trace traced_run values
"""


def own_tests(module: Path) -> list[Path]:
    """Return where the tests of a module may stand."""
    folder, room, name = TESTS / module.parent, module.parent.name or "lockstep", module.stem.strip("_")
    return [folder / f"test_{name}.py", folder / f"test_{room}_{name}.py"]


def named(listed: str) -> list[Path]:
    """Return the modules in a list of lines `room: names`."""
    rows = [line.partition(":") for line in listed.strip().splitlines()]
    return [Path(room, f"{name}.py") for room, _, names in rows for name in names.split()]


ELSEWHERE: Final = {module: test for test, listed in TOGETHER.items() for module in named(listed)}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_its_tests_where_it_stands(module: Path) -> None:
    has_own = any(path.is_file() for path in own_tests(module))
    listed = [module in ELSEWHERE, module in named(NOT_YET)]
    assert has_own + sum(listed) == 1, own_tests(module)[0].relative_to(TESTS)


def test_the_lists_name_what_is_there() -> None:
    assert {*ELSEWHERE, *named(NOT_YET)} <= {*MODULES}
    assert all((TESTS / test).is_file() for test in TOGETHER)


def test_a_name_of_another_room_has_the_room_before_it() -> None:
    assert own_tests(Path("data/text/tokens.py")) == [
        TESTS / "data/text/test_tokens.py",
        TESTS / "data/text/test_text_tokens.py",
    ]
