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

# A test of another name, and the modules whose tests it has: it goes through nearly all of their functions, mostly by
# a command or an engine, which need all of them.
TOGETHER: Final[dict[str, str]] = {
    "commands/test_adapters_trained.py": "models: finetuning\nrun: adapters",
    "commands/test_bring_your_own.py": "run: optimizing",
    "commands/test_checked_up.py": "checkup: rank",
    "commands/test_commands_compare.py": "comparison: drive plan",
    "commands/test_commands_plan.py": "planning: survey",
    "commands/test_commands_report.py": "inference: report\njobs: reader",
    "commands/test_deepspeed_train.py": "run: external_engine",
    "commands/test_doctor.py": "checkup: launch",
    "commands/test_eval.py": "run: evaluation",
    "commands/test_export.py": "exports: as_user base check export sample to_onnx to_safetensors to_timm to_torch "
    "to_transformers",
    "commands/test_first_look.py": "run: user_code\nrun/probe: first_look",
    "commands/test_import.py": "run: recipe_import",
    "commands/test_jobs.py": "config: recorded",
    "commands/test_launch.py": "jobs: launch\nlaunchers: agents",
    "commands/test_launchers.py": "run: handshake start",
    "commands/test_own_schedule.py": "run: schedule",
    "commands/test_own_source.py": "run: user_source",
    "commands/test_own_strategy.py": "run: strategy\nstrategies: base",
    "commands/test_predict.py": "commands: _overrides\ninference: pictures predict saved table text",
    "commands/test_script_arguments.py": "commands: _script",
    "commands/test_report_examples.py": "inference: inspection validation_pass",
    "commands/test_resume.py": "run: data_facts resume",
    "commands/test_run_folder.py": "run: completed folder",
    "commands/test_show.py": "commands: _recipe",
    "commands/test_sinks.py": "reporting: sink\nrun: sinks",
    "commands/test_stalls.py": "ranks: flight",
    "commands/test_submit.py": "jobs: submit",
    "commands/test_tensor_train.py": "strategies: tensor",
    "commands/test_train.py": "run: build checkpoints computing engine events examples rank rank_training training",
    "commands/test_verify.py": "verification: cases",
    "commands/test_verify_probe.py": "run/probe: findings probe state witness",
    "commands/test_commands_usual.py": "comparison: naive_ddp",
    "config/test_load.py": "config: across base placement recipe run schema wording",
    "common/test_schemas.py": "training/checkpoint: saved_state",
    "data/images/test_folder.py": "data/images: pictures",
    "data/images/test_webdataset.py": "data/images: tar_index",
    "data/tables/test_table.py": "data/tables: columns files rows",
    "data/test_imported.py": "data: collate items\ndata/images: leaves",
    "data/test_loader.py": "data: base",
    "data/text/test_text_files.py": "data/text: tokenizer",
    "launchers/test_command.py": "launchers: job local ssh",
    "launchers/test_detect.py": "launchers: environment horovodrun mpich openmpi slurm torchrun variables",
    "launchers/test_example.py": "launchers: base",
    "launchers/test_ray_train.py": ".: ray",
    "parallel/tensor/test_tensor_sequence_parallel.py": "parallel/layouts: sequence_parallel",
    "parallel/pipeline/test_pipeline_engine.py": "parallel/pipeline: cut_model graph_trace layout links "
    "place replay tied_weights",
    "parallel/context/test_exchange.py": "parallel: linear_map",
    "parallel/pipeline/test_pipeline_cut.py": "parallel/pipeline: call_trace part",
    "config/elsewhere/test_elsewhere_find.py": "config/elsewhere: imagenet pycls_networks translation",
    "parallel/test_audited.py": "parallel: audit_digests corruption kept_state",
    "parallel/test_data_parallel.py": "comm: fsdp\nparallel: engine numerics work_units\n"
    "parallel/layouts: base replicated",
    "parallel/test_deepspeed_engine.py": "comm: deepspeed",
    "parallel/test_optimize.py": "parallel: optimizer_trials",
    "parallel/test_operations_used.py": "device: kernels",
    "parallel/test_same_bits.py": "comm: older_fsdp\nparallel: mesh_engine",
    "parallel/tensor/test_dispatch.py": "parallel/layouts: experts\nstrategies: expert",
    "ranks/test_external.py": "ranks: member",
    "ranks/test_stall.py": "ranks: status",
    "ranks/test_strangers.py": "ranks: heartbeat",
    "comparison/test_comparison_result.py": "comparison: output page",
    "reporting/test_console.py": "reporting: terminal",
    "reporting/test_outside.py": "reporting: mlflow_sink wandb_sink",
    "run/test_joined.py": "run: membership\nrun: own_model own_placed own_resume own_sums",
    "run/test_run_own_loss.py": "run: own_loss_terms",
    "commands/test_replay.py": "commands: bisect\nreplay: drive own page run\n"
    "run: own_examination replaying update_norms",
    "strategies/test_strategies.py": "strategies: context ddp hsdp single zero1 zero2 zero3",
    "tasks/test_batches.py": "tasks: base",
    "tasks/test_classification.py": "tasks: own_loss",
    "test_cli.py": ".: __main__",
    "test_library.py": "run: background load",
    "training/test_loop.py": "training: events",
    "verification/test_compare.py": "verification: trace",
}


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
    assert has_own + (module in ELSEWHERE) == 1, own_tests(module)[0].relative_to(TESTS)


def test_the_lists_name_what_is_there() -> None:
    assert {*ELSEWHERE} <= {*MODULES}
    assert all((TESTS / test).is_file() for test in TOGETHER)


def test_a_name_of_another_room_has_the_room_before_it() -> None:
    assert own_tests(Path("data/text/tokens.py")) == [
        TESTS / "data/text/test_tokens.py",
        TESTS / "data/text/test_text_tokens.py",
    ]
