"""A small run for real launchers, small.yaml: one layer, since each process imports for itself what its model needs."""

from pathlib import Path

# Sleeps so many seconds with each micro-batch as the file `pace` says.
_MODEL = """
import time
from pathlib import Path
from torch import nn

class Paced(nn.Module):
    def forward(self, inputs):
        time.sleep(float(Path("pace").read_text() or 0))
        return inputs

def linear(num_classes):
    return nn.Sequential(Paced(), nn.Flatten(), nn.Linear(64, num_classes))
"""
_RECIPE = """
recipe:
  model: {{name: "paced:linear"}}
  data: {{name: digits}}
  batch: 64
  microbatches: 2
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.1}}
run: {{tensorboard: false, log_every: 1, save_every: {{steps: {save_every}}}, evaluate_every: {{steps: {steps}}}}}
"""


def write(folder: Path, steps: int, pace_s: float = 0.0, save_every: int = 10_000) -> None:
    """Write the model, the recipe and its pace into a folder."""
    (folder / "paced.py").write_text(_MODEL, encoding="utf-8")
    (folder / "small.yaml").write_text(_RECIPE.format(steps=steps, save_every=save_every), encoding="utf-8")
    pace(folder, pace_s)


def pace(folder: Path, seconds: float) -> None:
    """Let each micro-batch of a run take so much longer from now on."""
    (folder / "new").write_text(str(seconds), encoding="utf-8")
    (folder / "new").rename(folder / "pace")
