"""`lockstep submit`: what it refuses, what it writes, and what becomes of a job that a cluster does not take."""

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml
from conftest import invoke, put

from lockstep.runs.runs import read_job

pytestmark = pytest.mark.slow("runs whole commands")

SBATCH = """#!/bin/sh
echo "$@" > asked
echo "12;cluster"
"""

# Creates what it is given, but no JobSet whose name is taken; says what it did as kubectl does.
KUBECTL = """#!/bin/sh
echo "$@" >> asked
[ "$1" = create ] || exit 0
cat > given
echo secret/digits
if grep -q 'name: taken' given; then echo '"taken" already exists' >&2; exit 1; fi
echo jobset.jobset.x-k8s.io/digits
"""
# The models of the API's own descriptions: what they do not know they leave out.
MODELS = {
    "Secret": kubeflow.IoK8sApiCoreV1Secret,
    "Service": kubeflow.IoK8sApiCoreV1Service,
    "Job": kubeflow.IoK8sApiBatchV1Job,
    "JobSet": kubeflow.JobsetV1alpha2JobSet,
    "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
    "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
}
PODS = ("--on", "kubernetes", "--image", "here/train:1", "--claim", "runs:/runs")

submit = partial(invoke, "submit")


@pytest.fixture
def folder(programs: Path) -> Path:
    """Return the test's folder, in which there is an sbatch and nothing else of Slurm."""
    put(programs, "sbatch", SBATCH)
    return programs


def left(folder: Path) -> list[str]:
    return sorted(
        str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file() and "bin" not in each.parts
    )


def test_a_job_is_written_submitted_and_job_of(folder: Path) -> None:
    said = submit("--nodes", "2", "--time", "30", "--python", "py", "--", "train", "digits", "run.dir=runs/a").stdout
    assert said == (
        "job 12 submitted: runs/a/job.sh\nlogs: runs/a/logs, from Slurm slurm-12.log\nstatus: lockstep jobs runs/a\n"
    )
    assert (folder / "asked").read_text() == "--parsable runs/a/job.sh\n"
    assert (folder / "runs" / "a" / "logs").is_dir()
    text = (folder / "runs" / "a" / "job.sh").read_text()
    srun = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1"
    assert f"{srun} py -m lockstep train digits run.dir=runs/a placement.processes=2\n" in text
    submitted = read_job(folder / "runs" / "a")
    assert submitted.job == 12


def test_a_dry_run_prints_the_script_and_nothing_else(folder: Path) -> None:
    said = submit("--time", "30", "--dry-run", "--", "train", "digits", "run.dir=runs/a").stdout
    submit("--time", "30", "--", "train", "digits", "run.dir=runs/a")
    assert (folder / "runs" / "a" / "job.sh").read_text() == said
    submit("--dry-run", "--", "train", "digits", "run.dir=runs/b")
    assert not (folder / "runs" / "b").exists()


def test_what_slurm_is_asked_for_stands_in_the_script(folder: Path) -> None:
    asked = ["--partition=gpu", "--account=physics", "--gpus-per-node=a100:4", "--cpus-per-task=8"]
    text = submit(*asked, "--dry-run", "--", "train", "digits", "run.dir=runs/a").stdout
    assert [line for line in text.splitlines() if line.removeprefix("#SBATCH ") in asked] == [
        f"#SBATCH {word}" for word in asked
    ]
    assert "#SBATCH --ntasks-per-node=4\n" in text  # a rank for each card, unless another number is asked for
    text = submit(*asked, "--processes-per-node=2", "--dry-run", "--", "train", "digits", "run.dir=runs/a").stdout
    assert "#SBATCH --ntasks-per-node=2\n" in text


def test_a_run_without_a_folder_gets_one_for_all_its_starts(folder: Path) -> None:
    for _ in range(2):
        submit("--", "train", "digits")
    first, second = sorted((folder / "runs").iterdir())
    for run in (first, second):
        assert run.name.startswith("digits-convnet-2")
        assert f" train digits run.dir=runs/{run.name} placement.processes=1\n" in (run / "job.sh").read_text()


def test_what_the_user_said_of_folder_and_processes_stands(folder: Path) -> None:
    text = submit("--dry-run", "--", "train", "run.dir=runs/a", "placement.processes=1").stdout
    assert " train run.dir=runs/a placement.processes=1\n" in text


def test_a_run_from_a_checkpoint_elsewhere_begins_there_once(folder: Path) -> None:
    plain = submit("--dry-run", "--", "train", "digits", "run.dir=runs/a").stdout
    never = submit("--dry-run", "--", "train", "digits", "run.dir=runs/a", "run.resume=never").stdout
    assert "words=" not in plain
    assert "if [ -e runs/a/config.yaml ]; then words=(run.resume=auto); fi\n" in never


def test_a_folder_whose_run_saved_nothing_takes_another_recipe(folder: Path) -> None:
    """With a checkpoint it is refused: tests/setup/test_recipe_folder.py."""
    run = folder / "runs" / "a"
    run.mkdir(parents=True)
    recipe = invoke("show", "digits").stdout.partition("\n\n")[0]
    (run / "config.yaml").write_text(recipe, encoding="utf-8")
    submit("--", "train", "digits", "run.dir=runs/a")
    assert "submitted" in submit("--", "train", "digits", "run.dir=runs/a", "recipe.seed=5").stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo Invalid partition >&2; exit 1", "error: sbatch failed with exit code 1, and the job was not submitted"),
        ("echo hello", "error: sbatch: expected a job ID, got 'hello\\n'"),
    ],
)
def test_a_job_that_is_not_taken_leaves_nothing(folder: Path, text: str, problem: str) -> None:
    put(folder, "sbatch", f"#!/bin/sh\n{text}\n")
    for run in ("run.dir=a", "run.dir=runs/a"):
        assert submit("--", "train", "digits", run, code=1).stderr.startswith(problem)
    assert not (folder / "a").exists()
    assert not (folder / "runs").exists()


def test_a_folder_that_was_there_stays(folder: Path) -> None:
    put(folder, "sbatch", "#!/bin/sh\nexit 1\n")
    (folder / "a").mkdir()
    (folder / "a" / "notes").touch()
    submit("--", "train", "digits", "run.dir=a", code=1)
    assert (folder / "a" / "notes").exists()
    assert read_job(folder / "a") is None


def test_a_script_is_refused_with_the_words_that_were_typed(folder: Path) -> None:
    assert ", got a.py --lr 1; for a script, " in submit("--", "a.py", "--lr", "1", code=2).stderr


def test_without_slurm_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert submit("--", "train", "digits", code=2).stderr.startswith("error: sbatch not found;")
    assert left(folder) == []


def test_the_script_is_one(folder: Path) -> None:
    submit("--name", "it's", "--", "train", "digits", "run.dir=it's $HOME")
    done = subprocess.run(["bash", "-n", "it's $HOME/job.sh"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access("it's $HOME/job.sh", os.X_OK)


def objects(*words: str) -> list[dict[str, Any]]:
    """Return what `submit --on kubernetes` prints with these options."""
    return list(
        yaml.safe_load_all(submit(*PODS, *words, "--dry-run", "--", "train", "digits", "run.dir=/runs/a").stdout)
    )


def is_known(made: dict[str, Any]) -> bool:
    return bool(MODELS[made["kind"]].from_dict(made).to_dict() == made)


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "job"])
def test_kubernetes_knows_every_field_that_is_written(folder: Path, kind: str) -> None:
    asked = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4", "--queue=q", "--namespace=ours", f"--kind={kind}"]
    made = objects(*asked)
    assert [is_known(each) for each in made] == [True] * len(made)
    assert {each["metadata"]["name"] for each in made} == {"digits"}
    assert {each["metadata"]["namespace"] for each in made} == {"ours"}
    assert made[-1]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}


def test_a_field_that_kubernetes_does_not_know_is_noticed(folder: Path) -> None:
    made = objects()[-1]
    made["spec"]["failurePolicy"]["maxRestart"] = 3
    assert not is_known(made)
    made = objects()[-1]
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "two"
    with pytest.raises(ValueError, match="completions"):
        is_known(made)


def test_a_node_of_kubernetes_runs_its_ranks(folder: Path) -> None:
    secret, jobset = objects("--nodes=2", "--gpus-per-node=2", "--name=a", "--restarts=4", "--warn-before=60")
    assert len(secret["stringData"]["secret"]) == 64
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 4
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60
    [container] = pod["containers"]
    assert container["command"] == ["python3", "-m", "lockstep"]
    words = "launch --on node --processes-per-node 2 -- train digits run.dir=/runs/a"
    assert container["args"] == words.split()
    told = {each["name"]: each.get("value") for each in container["env"]}
    assert told == {"LOCKSTEP_NODES": "2", "LOCKSTEP_FIRST_NODE": "a-node-0-0.a", "LOCKSTEP_JOB_SECRET": None}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    again = submit(*PODS, "--dry-run", "--", "train", "run.dir=/runs/$(a)").stdout
    assert "run.dir=/runs/$$(a)" in again  # Kubernetes would look for a variable
    assert objects()[0] != objects()[0]  # each job has a secret of its own


def test_a_script_is_named_after_its_file(folder: Path) -> None:
    made = [*yaml.safe_load_all(submit(*PODS, "--dry-run", "--", "My_Loop.py", "/runs/a").stdout)]
    assert {each["metadata"]["name"] for each in made} == {"my-loop"}
    [job] = made[-1]["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-4:] == ["--", "python", "My_Loop.py", "/runs/a"]


def test_what_kubernetes_refuses_leaves_nothing_there(folder: Path) -> None:
    put(folder, "kubectl", KUBECTL)
    words = ("--", "train", "digits", "run.dir=/runs/a")
    assert submit(*PODS, *words).stdout == "created secret/digits\ncreated jobset.jobset.x-k8s.io/digits\n"
    said = submit(*PODS, "--name", "taken", "--namespace", "ours", *words, code=1).stderr
    assert said == 'error: kubectl failed with exit code 1; it printed:\n"taken" already exists\n'
    assert (folder / "asked").read_text().splitlines() == [
        "create --output name --filename -",
        "create --namespace ours --output name --filename -",
        "delete --namespace ours secret/digits",
    ]


def test_without_kubectl_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = submit(*PODS, "--", "train", "digits", "run.dir=/runs/a", code=2).stderr
    assert said.startswith("error: kubectl not found;")


def test_a_run_on_object_storage_needs_no_claim(here: Path) -> None:
    words = ("--on", "kubernetes", "--image", "here/train:1", "--dry-run", "--", "train", "digits")
    made = [*yaml.safe_load_all(submit(*words, "run.dir=s3://bucket/runs/a").stdout)]
    pod = made[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["shm"]
    assert [mount["name"] for mount in pod["containers"][0]["volumeMounts"]] == ["shm"]
    assert "run.dir=s3://bucket/runs/a" in pod["containers"][0]["args"]
