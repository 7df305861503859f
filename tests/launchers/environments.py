"""What real launchers set in their processes, as recorded in tests/fixtures/launchers.yaml: `ENV.slurm_block`."""

from pathlib import Path
from types import SimpleNamespace

import yaml

ENV = SimpleNamespace(**yaml.safe_load((Path(__file__).parents[1] / "fixtures/launchers.yaml").read_text("utf-8")))
