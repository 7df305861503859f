"""The notebook among the examples runs, and each of its cells a second time with the same results."""

from pathlib import Path
from typing import Any, Final

import nbclient
import nbformat
import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
NOTEBOOK: Final = ROOT / "examples" / "notebook.ipynb"


def results(cell: Any) -> list[str]:
    """Return what a cell returned, and the hashes that it printed."""
    texts = [each["data"]["text/plain"] for each in cell.outputs if each.output_type == "execute_result"]
    printed = "".join(each["text"] for each in cell.outputs if each.output_type == "stream")
    return [*texts, *(word for word in printed.split() if len(word) == 64)]


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of what runs the notebook
def test_each_cell_runs_and_runs_again_with_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
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
