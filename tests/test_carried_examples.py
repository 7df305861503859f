"""The examples that carry values of samples between steps: one hash on any number of processes, a plain loop's bits."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

pytestmark = pytest.mark.slow("runs whole commands")

EXAMPLES: Final = Path(__file__).resolve().parent.parent / "examples"
NAMES: Final = ("truncated_bptt", "memory_queue")


def example(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(name: str, folder: Path, processes: int, *words: str) -> str:
    """Run an example, and return the hash of its weights."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), str(folder), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    [sha256] = re.findall(r"weights sha256 ([0-9a-f]{64})", ended.stdout)
    return sha256


def kept(folder: Path, key: str) -> Tensor:
    """Return a tensor of run.state, as the last checkpoint has it."""
    from safetensors.torch import load_file

    [*_, last] = sorted((folder / "checkpoints").glob("step-*"))
    return load_file(last / "script.safetensors")[f'["{key}"]']


def plain_truncated_bptt(module: ModuleType, model: nn.Module) -> Tensor:
    windows, rows = module.Windows(), torch.arange(module.ROWS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(module.EPOCHS):
        hidden = torch.zeros(module.ROWS, module.WIDTH)
        for window in range(module.WINDOWS):
            items = [windows[window * module.ROWS + int(row)] for row in rows]
            x, y = (torch.stack([each[part] for each in items]) for part in (0, 1))
            scores, hidden = model(x, hidden.detach())
            optimizer.zero_grad()
            F.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return hidden.detach()


def plain_memory_queue(module: ModuleType, model: nn.Module) -> Tensor:
    views = module.Views().views
    queue = F.normalize(torch.randn(module.QUEUE, module.WIDTH, generator=torch.Generator().manual_seed(2)), dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(module.EPOCHS):
        for numbers in torch.tensor(module.order(epoch)).split(module.BATCH):
            queries = F.normalize(model(views[0][numbers]), dim=1)
            with torch.no_grad():
                keys = F.normalize(model(views[1][numbers]), dim=1)
            optimizer.zero_grad()
            module.contrast(queries, keys, queue).backward()
            optimizer.step()
            queue = torch.cat([keys, queue])[: module.QUEUE]
    return queue


PLAIN: Final[dict[str, tuple[str, Callable[[ModuleType, nn.Module], Tensor]]]] = {
    "truncated_bptt": ("hidden", plain_truncated_bptt),
    "memory_queue": ("queue", plain_memory_queue),
}


@pytest.mark.parametrize("name", NAMES)
def test_it_has_one_hash_on_one_process_on_two_and_on_three(tmp_path: Path, name: str) -> None:
    assert len({trained(name, tmp_path / str(processes), processes) for processes in (1, 2, 3)}) == 1
    first, *others = (kept(tmp_path / str(processes), PLAIN[name][0]) for processes in (1, 2, 3))
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("name", NAMES)
def test_with_one_micro_batch_it_is_a_plain_loop(tmp_path: Path, name: str) -> None:
    sha256 = trained(name, tmp_path / "run", 1, "1")
    key, plain = PLAIN[name]
    module = example(name)
    model = first_model(module, name)
    carried = plain(module, model)
    saved = lockstep.load(tmp_path / "run", model=lambda: first_model(module, name)).state_dict()
    for parameter, value in model.state_dict().items():
        assert torch.equal(value, saved[parameter]), parameter
    assert torch.equal(carried, kept(tmp_path / "run", key))
    assert sha256 != trained(name, tmp_path / "other", 1, "1", "1")  # of fewer epochs


def first_model(module: ModuleType, name: str) -> nn.Module:
    """Build the model with the random numbers that lockstep.join seeds."""
    from lockstep.core import random
    from lockstep.data.items import seed_rngs

    seed_rngs(random.make_key(random.INITIAL, 0))
    model: nn.Module = module.Reader(module.Windows().size) if name == "truncated_bptt" else module.encoder()
    return model
