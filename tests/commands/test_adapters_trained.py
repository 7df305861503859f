"""Adapters are trained to one hash however they are placed, and peft reads what is exported."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import DIGITS, WIDTH
from forked import Server
from test_start_from import PLACED, SHORT, a  # noqa: F401 - a fixture

import lockstep
from lockstep.errors import UsageError
from lockstep.exports.adapters import export_adapters
from lockstep.models.adapters import Lora, add_adapters
from lockstep.models.digits_convnet import digits_convnet

pytestmark = pytest.mark.slow("runs whole commands")

LORA = 'recipe.model.lora={target_modules: [convolutions.0, "5.convolutions.3"], r: 4, dropout: 0.1, train: "9.*"}'


def test_one_hash_and_pefts_files(server: Server, run, a) -> None:  # noqa: F811
    import peft

    server.load("peft")  # each run would import it
    words = ("train", *DIGITS, *SHORT, "recipe.model.weights=a", LORA)
    alone = run(*words, "run.dir=alone", "placement.processes=1")
    for number, (count, strategy) in enumerate(PLACED["weights"]):
        placed = run(*words, f"run.dir=b{number}", f"placement.processes={count}", f"placement.strategy={strategy}")
        assert placed.sha256 == alone.sha256, strategy
    trained = safetensors.torch.load_file("alone/checkpoints/latest/model.safetensors")
    before = safetensors.torch.load_file("a/checkpoints/latest/model.safetensors")
    assert torch.equal(trained["3.convolutions.0.base_layer.weight"], before["3.convolutions.0.weight"])
    assert torch.equal(trained["1.running_mean"], before["1.running_mean"])
    assert not torch.equal(trained["9.weight"], before["9.weight"])
    ours = digits_convnet(width=WIDTH)
    add_adapters(ours, Lora(["convolutions.0", "5.convolutions.3"], r=4, dropout=0.1, train=["9.*"]))
    ours.load_state_dict(trained)
    assert all(torch.equal(each, trained[name]) for name, each in lockstep.load("alone").state_dict().items())
    assert export_adapters("alone", "adapter") == Path("adapter")
    modes = {file.stat().st_mode & 0o777 for file in Path("adapter").iterdir()}
    assert modes == {Path("alone/config.yaml").stat().st_mode & 0o777}  # by the umask
    theirs = digits_convnet(width=WIDTH)
    theirs.load_state_dict(before)
    inputs = torch.randn(4, 1, 8, 8)
    first = theirs.eval()(inputs)
    loaded = peft.PeftModel.from_pretrained(theirs, "adapter").eval()
    expected = ours.eval()(inputs)
    torch.testing.assert_close(loaded(inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(loaded.merge_and_unload()(inputs), expected, rtol=1e-4, atol=1e-5)
    assert (first - expected).abs().max() > 1e-3
    with pytest.raises(UsageError, match="the run has no adapters"):
        export_adapters("a", "other")
    assert not Path("other").exists()
