"""What each launcher sets, and what each process makes of it."""

from collections.abc import Mapping

import pytest
from click.testing import CliRunner
from environments import ENV

import lockstep
from lockstep.commands import train
from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import ORDER, detect, detect_all, horovodrun, mpich, openmpi, slurm

ADDRESS = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "info"),
    [
        ({}, None),
        ({"PATH": "/bin", "LOCAL_RANK": "1", "MASTER_ADDR": "node0"}, None),  # left over from something else
        (ENV.torchrun, RankInfo(3, 4, 1, 2, "torchrun", "node0", 29500, hosted=True)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankInfo(0, 1, 0, 1, "environment")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"},
            RankInfo(1, 2, 0, 1, "environment", "127.0.0.1", 29501),
        ),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, RankInfo(5, 8, 1, 2, "environment")),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            RankInfo(5, 8, 1, 4, "environment"),
        ),
        (ENV.slurm_block, RankInfo(3, 4, 0, 1, "slurm", "n1", 20016)),
        (ENV.slurm_cyclic, RankInfo(2, 4, 1, 3, "slurm", "n1", 20032)),
        (ENV.slurm_uneven, RankInfo(4, 5, 3, 4, "slurm", "n1", 20048)),
        (ENV.slurm_one_host, RankInfo(1, 2, 1, 2, "slurm", "127.0.0.1", 20097)),
        (ENV.slurm_pmi2, RankInfo(1, 3, 1, 2, "slurm", "n1", 20064)),
        (ENV.slurm_block | ADDRESS, RankInfo(3, 4, 0, 1, "slurm", "node7", 29500)),
        (ENV.slurm_arbitrary | ADDRESS, RankInfo(0, 3, 0, 2, "slurm", "node7", 29500)),
        (ENV.slurm_one_task, None),  # a place like any machine
        (ENV.slurm_batch, None),
        (ENV.slurm_salloc, None),
        ({"SLURM_JOB_ID": "17"}, None),
        (ENV.slurm_block | {"SLURM_STEP_ID": "4294967290"}, None),  # what salloc starts on the first host
        (ENV.slurm_block | {"SLURM_STEP_ID": "4294967291"}, None),  # a batch script
        (ENV.openmpi | ADDRESS, RankInfo(1, 3, 1, 3, "openmpi", "node7", 29500, openmpi._ADVICE)),
        (ENV.mpich, RankInfo(1, 3, 1, 3, "mpich", "127.0.0.1", 29500, mpich._ADVICE)),
        (ENV.mpich | ADDRESS, RankInfo(1, 3, 1, 3, "mpich", "node7", 29500, mpich._ADVICE)),
        (ENV.mpich_in_slurm, RankInfo(3, 5, 3, 4, "mpich", None, 29500, mpich._ADVICE)),
        (ENV.horovod | ADDRESS, RankInfo(3, 4, 1, 2, "horovodrun", "node7", 29500, horovodrun._ADVICE)),
    ],
)
def test_who_a_process_is(env: Mapping[str, str], info: RankInfo | None) -> None:
    assert detect(env) == info


def test_each_launcher_knows_its_own() -> None:
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    envs = {
        "node": by_hand | {"LOCKSTEP_NODE_STARTED": "0"},
        "torchrun": ENV.torchrun,
        "environment": by_hand,
        "horovodrun": ENV.horovod,
        "openmpi": ENV.openmpi,
        "mpich": ENV.mpich,
        "slurm": ENV.slurm_block,
    }
    assert [launcher.name for launcher in ORDER if launcher.detect] == list(envs)
    for name, env in envs.items():
        found = {launcher.name for launcher in ORDER if launcher.detect and launcher.detect(env)}
        assert found == {name} | ({"environment"} if name in ("node", "torchrun") else set())


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (ENV.slurm_block | ENV.torchrun, "torchrun"),
        (ENV.openmpi | ENV.torchrun, "torchrun"),
        (ENV.slurm_block | {"RANK": "0", "WORLD_SIZE": "2"}, "environment"),
        (ENV.openmpi | {"RANK": "0", "WORLD_SIZE": "2"}, "environment"),
        (ENV.slurm_block | {"WORLD_SIZE": "4"}, "slurm"),  # as batch scripts set it
        (ENV.slurm_block | {"RANK": "0"}, "slurm"),
        (ENV.openmpi | {"HOROVOD_CONTROLLER": "mpi"}, "openmpi"),  # horovodrun over mpirun
        (ENV.slurm_block | ENV.openmpi, "openmpi"),
        (ENV.mpich_in_slurm, "mpich"),
        (ENV.slurm_pmi2, "slurm"),
    ],
)
def test_the_launcher_that_came_last_decides(env: Mapping[str, str], name: str) -> None:
    info = detect(env)
    assert info.launcher == name
    assert next(each for each in detect_all(env) if each.info).launcher.name == name


def test_all_processes_of_a_job_have_one_port_and_jobs_have_others() -> None:
    def port(env: Mapping[str, str]) -> int:
        info = detect(env)
        assert info.port is not None
        return info.port

    assert port(ENV.openmpi) == port(ENV.openmpi | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"})
    assert port(ENV.horovod) == port(ENV.horovod | {"HOROVOD_RANK": "0", "HOROVOD_HOSTNAME": "a"})
    ports = {port(ENV.openmpi | {"PMIX_NAMESPACE": f"prterun-a-{job}@1"}) for job in range(50)}
    ports |= {port(ENV.horovod | {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(job)}) for job in range(32768, 32818)}
    assert len(ports) > 95
    steps = {("7", "0"), ("7", "1"), ("7", "15"), ("8", "0"), ("4294901760", "5")}
    ports = {port(ENV.slurm_block | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}) for job, step in steps}
    assert len(ports) == len(steps)
    assert all(20_000 <= each < 29_000 for each in ports)


def test_several_hosts_of_which_rank_0s_is_not_known_have_no_address() -> None:
    info = openmpi.detect(ENV.openmpi | {"OMPI_COMM_WORLD_SIZE": "6"})
    assert info.master is None
    assert "mpirun -x MASTER_ADDR=HOST" in info.advice


@pytest.mark.parametrize(
    ("env", "problems"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE is not set; set RANK and WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["RANK is not set; set RANK and WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"} | ENV.slurm_batch, ["RANK is not set; set RANK and WORLD_SIZE"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2 with WORLD_SIZE=2: expected a rank from 0 to 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ["RANK=-1: expected an integer"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, ["LOCAL_RANK=: expected an integer"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "65536"},
            ["MASTER_PORT=65536: expected a port from 1 to 65535"],
        ),
        (
            {"RANK": "one", "WORLD_SIZE": "two", "MASTER_PORT": "http"},
            [f"{name}: expected an integer" for name in ("RANK=one", "WORLD_SIZE=two", "MASTER_PORT=http")],
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "x"},
            [
                "OMPI_COMM_WORLD_RANK=x: expected an integer",
                *(
                    f"OMPI_COMM_WORLD_{name} is not set; mpirun of Open MPI sets it in each process"
                    for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE")
                ),
            ],
        ),
        (
            ENV.openmpi | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "4"},
            [
                "OMPI_COMM_WORLD_RANK=3 with OMPI_COMM_WORLD_SIZE=3: expected a rank from 0 to 2",
                "OMPI_COMM_WORLD_LOCAL_RANK=4 with OMPI_COMM_WORLD_LOCAL_SIZE=3: expected a rank from 0 to 2",
            ],
        ),
        (
            ENV.mpich | {"MPI_LOCALNRANKS": "4"},
            ["MPI_LOCALNRANKS=4: more processes on this host than PMI_SIZE=3"],
        ),
        (
            {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_SIZE": "2"},
            ["PMI_RANK is not set; mpiexec of MPICH and Intel MPI sets it in each process"],
        ),
        (
            {"HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"},
            ["HOROVOD_RANK is not set; horovodrun sets it in each process"],
        ),
        (
            ENV.slurm_block
            | {"SLURM_STEP_TASKS_PER_NODE": "2(x", "SLURM_STEP_NODELIST": "n[2-1]", "SLURM_LOCALID": "a"},
            [
                "SLURM_LOCALID=a: expected an integer",
                "SLURM_STEP_TASKS_PER_NODE=2(x: expected task counts such as 2(x3),1",
                "SLURM_STEP_NODELIST=n[2-1]: expected numbers such as 1-2,5 in the brackets, got 2-1",
            ],
        ),
        (
            ENV.slurm_block | {"SLURM_PROCID": "4", "SLURM_LOCALID": "1"},
            [
                "SLURM_PROCID=4 with SLURM_STEP_NUM_TASKS=4: expected a rank from 0 to 3",
                "SLURM_LOCALID=1: expected less than 1, the number of tasks on host 1",
            ],
        ),
        (
            ENV.slurm_block | {"SLURM_STEP_NODELIST": "n1"},
            [
                "the variables contradict each other: SLURM_STEP_TASKS_PER_NODE has 4 tasks on 2 hosts, "
                "SLURM_STEP_NUM_TASKS=4, SLURM_STEP_NODELIST has 1 hosts, SLURM_NODEID=1; do not change the variables "
                "of srun"
            ],
        ),
        (
            ENV.slurm_arbitrary,
            [
                "SLURM_DISTRIBUTION=arbitrary: rank 0 is not on the first host of n[1-2], and srun does not "
                "provide its host; export MASTER_ADDR=HOST"
            ],
        ),
    ],
)
def test_what_cannot_be_is_told_all_at_once(env: Mapping[str, str], problems: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        detect(env)
    assert str(caught.value).splitlines() == problems


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST"])
def test_a_step_without_its_variables_is_told(name: str) -> None:
    env = {key: value for key, value in ENV.slurm_block.items() if key != name}
    with pytest.raises(UsageError, match=f"{name} is not set; srun sets it in each task"):
        slurm.detect(env)


@pytest.mark.parametrize(
    ("env", "processes", "warned"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}, 4, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1"}, 1, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1"}, "auto", True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1"}, 4, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, "auto", False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, 4, False),  # a job that asked for nodes alone
        ({"SLURM_NTASKS": "4"}, 1, False),
        ({}, 1, False),
    ],
)
def test_a_job_of_several_tasks_without_srun_is_told_of_it(
    env: Mapping[str, str], processes: int | str, warned: bool
) -> None:
    found = slurm.make_warning(env, processes)
    assert ("srun did not start this process" in found and "--ntasks=1" in found) is warned
    assert warned or not found


def test_train_warns_in_a_job_of_several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lockstep.setup.completed.make_completion_notice", lambda _: "done"
    )  # so that nothing is trained
    words = ["digits", "placement.processes=1"]
    assert "SLURM_NTASKS" not in CliRunner().invoke(train.command, words).output
    for name, value in {"JOB_ID": "7", "NTASKS": "2", "JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert "warning: this Slurm job has 2 tasks" in CliRunner().invoke(train.command, words).output
    assert "SLURM_NTASKS" not in CliRunner().invoke(train.command, ["digits", "placement.processes=2"]).output


def test_a_loop_of_ones_own_warns_in_a_job_of_several_tasks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"JOB_ID": "7", "NTASKS": "2", "JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("lockstep.loop.member.make_single_process_rendezvous", _end)  # what comes after the warning
    with pytest.raises(KeyboardInterrupt):
        lockstep.join(seed=0)
    assert "warning: this Slurm job has 2 tasks" in capsys.readouterr().err


def _end() -> None:
    raise KeyboardInterrupt
