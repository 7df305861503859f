"""The launcher that docs/extend.md adds: it works as it stands there, and we do not have it yet."""

import re
from typing import Any

import pytest
from sections import section

from lockstep.common.rank import RankInfo
from lockstep.errors import UsageError
from lockstep.launchers import ORDER
from lockstep.launchers.base import Launcher

pytestmark = [pytest.mark.slow("other programs, or minutes"), pytest.mark.cluster]

PAGE = section("extend.md", "Add a launcher")
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "17",
    "MASTER_ADDR": "a",
}


@pytest.fixture
def example() -> dict[str, Any]:
    found = re.search(r"^```python\n(\"\"\".*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(found[1], "extend.md", "exec"), names)
    return names


def test_the_example_finds_its_ranks(example: dict[str, Any]) -> None:
    assert example["detect"](JSRUN) == RankInfo(3, 4, 1, 2, "jsrun", "a", 20017)
    assert example["detect"]({"LSB_JOBID": "17"}) is None
    with pytest.raises(UsageError, match="JSM_NAMESPACE_SIZE is not set; jsrun sets it"):
        example["detect"]({"JSM_NAMESPACE_RANK": "0"})


def test_the_example_is_new(example: dict[str, Any]) -> None:
    assert not any(launcher.detect(JSRUN) for launcher in ORDER if launcher.detect)
    assert isinstance(example["LAUNCHER"], Launcher)
    assert set(example["LAUNCHER"].variables) >= JSRUN.keys()
