"""scripts/release: what it finds wrong with packages, and a release that is built and trained with."""

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from component import script

import lockstep

ROOT = Path(__file__).parent.parent
TRACKED = ("LICENSE", "README.md", "pyproject.toml", "src/lockstep/a.py", "src/lockstep/b.yaml", "tests/test_a.py")
URL = "https://example.org/a/b"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return script("release")


def packages(folder: Path, in_wheel: tuple[str, ...], in_sdist: tuple[str, ...], metadata: str = "") -> list[Path]:
    """Write a wheel and an sdist with these files, and return their paths."""
    wheel, sdist = folder / "lockstep_train-1.0-py3-none-any.whl", folder / "lockstep_train-1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in in_wheel:
            file.writestr(name, "")
        file.writestr("lockstep_train-1.0.dist-info/METADATA", metadata)
    with tarfile.open(sdist, "w:gz") as archive:
        for name in in_sdist:
            archive.addfile(tarfile.TarInfo(f"lockstep_train-1.0/{name}"), io.BytesIO())
    return [wheel, sdist]


def test_packages_have_the_files_of_the_repository_and_no_other(release: ModuleType, tmp_path: Path) -> None:
    whole = packages(tmp_path, ("lockstep/a.py", "lockstep/b.yaml"), (*TRACKED, "PKG-INFO"))
    assert release.check_contents(*whole, TRACKED, "1.0") == []
    assert release.check_contents(*whole, TRACKED, "1.1") == ["lockstep_train-1.0-py3-none-any.whl: not 1.1"]
    broken = packages(tmp_path, ("lockstep/a.py", "lockstep/c.py"), ("src/lockstep/a.py", "notes"))
    found = [each.partition(": ")[2] for each in release.check_contents(*broken, TRACKED, "1.0")]
    assert found == [
        "lockstep/b.yaml is missing",
        "lockstep/c.py is not in the repository",
        *(f"{name} is missing" for name in ("LICENSE", "README.md", "pyproject.toml", "src/lockstep/b.yaml")),
        "notes is not in the repository",
    ]


def test_links_of_the_description_lead_to_the_tag(release: ModuleType, tmp_path: Path) -> None:
    page = "[a](docs/a.md#b) ![c](docs/c.svg) [d](https://example.org/d) [e](#e)\n"
    text = release.absolute_links(page, URL, "v1.0")
    assert text == (
        f"[a]({URL}/blob/v1.0/docs/a.md#b) ![c]({URL}/raw/v1.0/docs/c.svg) [d](https://example.org/d) [e](#e)\n"
    )
    header = (
        "Metadata-Version: 2.4\nName: lockstep-train\nVersion: 1.0\nSummary: Train PyTorch models on any number of "
        "processes with the same numbers, bit for bit.\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\n"
        "Description-Content-Type: text/markdown\n\n"
    )
    [good, _] = packages(tmp_path, (), (), header + text)
    assert release.check_metadata(good, "1.0") == []
    [bad, _] = packages(tmp_path, (), (), header + page)
    assert release.check_metadata(bad, "1.1") == [
        "Version: 1.0, not 1.1",
        "the description has a relative link: docs/a.md#b",
        "the description has a relative link: docs/c.svg",
    ]


def test_the_changelog_begins_with_the_version(release: ModuleType) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert release.check_changelog(text, lockstep.__version__) == []
    assert release.check_changelog(text, "9.9") == [
        f"CHANGELOG.md begins with {lockstep.__version__}, and the version is 9.9"
    ]
    assert len(text.encode()) < 8_000


@pytest.mark.slow("builds packages and installs them")
def test_a_release_is_built_and_trains_without_the_clone(tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "scripts" / "release", "--borrow", "--repository", URL, "--out", tmp_path]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"installed from the wheel, on 1 and 2 processes: [0-9a-f]{64}$", done.stdout, re.M)) == 2
    assert {each.suffix for each in tmp_path.iterdir()} == {".whl", ".gz"}
    assert "twine upload" in done.stdout
