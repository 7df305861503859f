"""What `lockstep submit --on kubernetes` writes, on pods of this machine: what is counted, and what the weights are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from component import require_hosts

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

SCRIPTS = Path(__file__).parents[2] / "scripts"
# The pods of a training end with the codes of argv, one after the other, a line each of them for each pod.
ENDING = """
import json, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import namespaces, network, yaml
from pods import Cluster
from lockstep.launchers import kubernetes
from lockstep.launchers.job import Job

def inside():
    network.open_switch()
    network.call("mount", "-t", "tmpfs", "tmpfs", "/mnt")
    found = {{}}
    for kind in kubernetes.KINDS:
        asked = kubernetes.Cluster("a", "here", "runs", "/mnt/runs", kind=kind, restarts=2, grace_s=5, secret="s")
        for codes in sys.argv[1:]:
            folder = Path(kind + "-" + codes)
            folder.mkdir()
            (folder / "codes").write_text(codes.replace("-", "\\n") + "\\n")
            cluster = Cluster({{"runs": folder.absolute()}}, folder / "logs")
            text = kubernetes.render_manifest(Job(("train",), "python", 1), asked)
            text = text.replace('["python", -m, lockstep]', json.dumps(["sh", "-c", {pod!r}, "sh"]))
            ended = cluster.run(list(yaml.safe_load_all(text)), lambda cluster: False)
            found[kind + " " + codes] = [ended, cluster.restarts, cluster.failures]
    print(json.dumps(found))
    return 0

sys.exit(namespaces.run(inside, network.PROGRAMS, "iproute2", ["--net"]))
"""
POD = "code=$(head -n 1 /mnt/runs/codes); sed -i 1d /mnt/runs/codes; exit $code"


@pytest.fixture(autouse=True)
def _hosts() -> None:
    require_hosts()


def test_a_save_is_free_and_a_failure_is_counted_until_there_are_too_many(tmp_path: Path) -> None:
    file = tmp_path / "ending.py"
    file.write_text(ENDING.format(scripts=str(SCRIPTS), pod=POD), encoding="utf-8")
    endings = ["0", "75-75-75-75-0", "1-75-1-0", "1-1-1-0", "75-2-0", "4-0"]
    done = subprocess.run([sys.executable, str(file), *endings], cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    for kind in ("jobset", "trainjob"):
        assert [found[f"{kind} {each}"][:2] for each in endings] == [
            ["complete", 0],
            ["complete", 0],
            ["complete", 2],
            ["ReachedMaxRestarts", 2],
            ["FailJobSet", 0],  # the configuration
            ["FailJobSet", 0],  # what the node lacks
        ]
    assert [found[f"job {each}"] for each in endings] == [
        ["complete", 0, 0],
        ["complete", 0, 0],
        ["complete", 0, 2],
        ["BackoffLimitExceeded", 0, 3],
        ["PodFailurePolicy", 0, 0],
        ["PodFailurePolicy", 0, 0],
    ]


def test_nodes_that_are_drained_and_lost_leave_the_weights_of_one_process(tmp_path: Path) -> None:
    words = [SCRIPTS / "prove-kubernetes", "--kills", "2", "kills", "--json", tmp_path / "rows.json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert (row["disturbed"], row["counted"], row["right"]) == (["drained", "lost"], 1, True)
