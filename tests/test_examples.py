"""The examples run: each cell of the notebook twice with the same results, the GAN with one hash wherever it runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.slow("runs whole commands")

ROOT: Final = Path(__file__).resolve().parent.parent
EXAMPLES: Final = ROOT / "examples"


def results(cell: Any) -> list[str]:
    """Return what a cell returned, and the hashes that it printed."""
    texts = [each["data"]["text/plain"] for each in cell.outputs if each.output_type == "execute_result"]
    printed = "".join(each["text"] for each in cell.outputs if each.output_type == "stream")
    return [*texts, *(word for word in printed.split() if len(word) == 64)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of what runs the notebook
def test_each_cell_runs_and_runs_again_with_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs for cell in cells)  # none is kept in the repository
    again = nbformat.from_dict([{**cell, "id": f"{cell.id}-again"} for cell in cells])
    notebook.cells = [each for pair in zip(cells, again, strict=True) for each in pair]
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert all(results(cell) and results(cell) == results(other) for cell, other in zip(cells, again, strict=True))
    [sha256], [alone] = results(cells[0]), results(cells[1])
    assert sha256 in alone  # of two processes and of one


def trained(folder: Path, *launcher: str) -> tuple[str, str]:
    """Run the GAN; return the hash of its weights, and what it printed."""
    command = [sys.executable, *launcher, str(EXAMPLES / "dcgan.py"), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    [sha256] = re.findall(r"weights sha256 ([0-9a-f]{64})", ended.stdout)
    return sha256, ended.stdout


def test_the_gan_has_one_hash_on_one_process_and_on_two_and_where_it_resumes(tmp_path: Path) -> None:
    alone, _ = trained(tmp_path / "alone")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert trained(tmp_path / "two", *torchrun)[0] == alone
    for name in ("latest", "step-00000030"):  # as after a kill in the last epoch
        left = tmp_path / "two" / "checkpoints" / name
        left.unlink() if left.is_symlink() else shutil.rmtree(left)
    resumed, printed = trained(tmp_path / "two")
    assert "resuming after step 20" in printed
    assert resumed == alone
