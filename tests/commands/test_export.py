"""`lockstep export`: what its user loads, without Lockstep, gives what the run's own model gives."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from component import require_package
from forked import Server
from safetensors.torch import load_file
from test_predict import TRUST, plain
from torch import nn

import lockstep
from lockstep.errors import TrainingError, UsageError
from lockstep.exports import to_safetensors, to_torch
from lockstep.exports.check import check_export
from lockstep.exports.export import export_saved
from lockstep.inference.images import get_preprocessing
from lockstep.inference.saved import DatasetInfo, SavedModel, open_saved
from lockstep.run.evaluation import EvalRequest

pytestmark = pytest.mark.slow("runs whole commands")

VIT = (
    "{name: vit, source: transformers, options: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "intermediate_size: 16, patch_size: 4}}"
)
LLAMA = (
    "{name: llama, source: transformers, options: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, intermediate_size: 16}"
)
# Each export starts a process that imports what loads it, and some tests have several.
EQUAL = "the outputs are equal, bit for bit"


@pytest.fixture(scope="module")
def _loaded(server: Server) -> None:
    """Import what commands would each import anew."""
    server.load("timm", "peft", "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit")


@pytest.fixture
def trained(finished, here: Path) -> Path:
    """Return a run that learned digits, in the test's folder, which is the current one."""
    shutil.copytree(finished().folder / "run", here / "run", symlinks=True)
    return here / "run"


@pytest.fixture
def saved(trained: Path) -> SavedModel:
    return open_saved(EvalRequest("run", (TRUST, "placement.device=cpu")))


def left(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "exports").iterdir())


def test_weights_with_what_their_user_needs(run, trained):
    found = run("export", "run", "--to", "safetensors", TRUST)
    assert f"checked with 3 samples of the validation data: {EQUAL}\nrun/exports/step-00000023.safetensors" in found.out
    file = trained / "exports" / "step-00000023.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        told = opened.metadata()
    assert json.loads(told["classes"]) == [str(digit) for digit in range(10)]
    assert json.loads(told["mean"]) == [0.3061]
    build = json.loads(told["build"])
    assert (build["function"], build["options"]["dropout"]) == ("lockstep.models.digits_convnet:digits_convnet", 0.1)
    own = load_file(trained / "checkpoints" / "latest" / "model.safetensors")
    assert all(torch.equal(each, own[name]) for name, each in load_file(file).items())
    assert "already exists" in run("export", "run", "--to", "safetensors", TRUST, code=2).err
    assert left(trained) == [file.name]


def test_from_python_the_same_is_written(trained, capfd):
    overrides = dict([TRUST.split("=")])
    found = lockstep.export("run", "safetensors", out="own.safetensors", overrides=overrides)
    assert (found.path, found.sizes) == (Path("own.safetensors"), "")
    assert found.check == f"with 3 samples of the validation data: {EQUAL}"
    saved = load_file(trained / "checkpoints" / "latest" / "model.safetensors")
    assert all(torch.equal(each, saved[name]) for name, each in load_file("own.safetensors").items())
    for options, told in (
        ({"out": "own.safetensors", "trust": True}, "own.safetensors: already exists"),
        ({}, "its recipe references code, which would run with your permissions: .*from Python, trust=True"),
        ({"weights": "average", "trust": True}, "weights: expected 'model' or 'ema', got 'average'"),
    ):
        with pytest.raises(UsageError, match=told):
            lockstep.export("run", "safetensors", **options)
    with pytest.raises(UsageError, match="--to saftensors: no such format; did you mean 'safetensors'"):
        lockstep.export("run", "saftensors", trust=True)
    assert capfd.readouterr() == ("", "")


def test_a_program_takes_any_number_of_samples(run, trained):
    found = run("export", "run", "--to", "torch", "--out", "net", TRUST)
    assert found.out.endswith(f"{EQUAL}\nnet, inputs of shape [any, 1, 8, 8]\n")
    facts = {"lockstep.json": ""}
    with Path("net").open("rb") as file:
        program = torch.export.load(file, extra_files=facts)
    assert program.module()(torch.zeros(7, 1, 8, 8)).shape == (7, 10)
    assert json.loads(facts["lockstep.json"])["std"] == [0.3771]
    assert program.example_inputs is None  # nobody's samples


def test_onnx(run, trained):
    require_package("onnx")
    import onnx

    found = run("export", "run", "--to", "onnx", "--out", "net.onnx", TRUST)
    assert "net.onnx, inputs of shape [any, 1, 8, 8]" in found.out
    told = {each.key: json.loads(each.value) for each in onnx.load("net.onnx").metadata_props}
    assert told["mean"] == [0.3061]


def test_what_is_not_installed_is_named(saved, monkeypatch):
    monkeypatch.setattr("lockstep.exports.to_onnx.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"requires onnx, onnxscript, onnxruntime; .*lockstep-train\[onnx\]"):
        export_saved(saved, "onnx")


def test_samples_of_several_inputs_are_no_pictures(saved):
    with pytest.raises(UsageError, match="samples of dataset digits have no single shape, but images have 1 or 3"):
        get_preprocessing(replace(saved, dataset_info=DatasetInfo()))


def test_models_of_others_are_refused(run, trained):
    for to in ("timm", "transformers"):
        told = run("export", "run", "--to", to, TRUST, code=2).err
        assert f"model digits_convnet is not a {to} model; use --to torch or --to safetensors" in told
    assert not (trained / "exports").exists()


def test_an_export_of_other_weights_leaves_nothing(saved, trained, monkeypatch):
    """Of a file in which one weight is off, and of one that cannot be loaded."""
    write = to_safetensors.write

    def damaged(subject, place):
        with torch.no_grad():
            next(subject.model.parameters())[0] += 1e-3
        return write(subject, place)

    monkeypatch.setattr(to_safetensors, "write", damaged)
    with pytest.raises(TrainingError, match=r"differ from those of the run's model by .* \(tolerance 0\), so"):
        export_saved(saved, "safetensors")
    monkeypatch.setattr(to_safetensors, "write", lambda subject, place: place.write_text("no"))
    with pytest.raises(TrainingError, match="cannot load the export, so nothing was written"):
        export_saved(saved, "safetensors")
    monkeypatch.setattr(to_torch, "write", lambda subject, place: place.write_text("yes"))
    monkeypatch.setattr("lockstep.exports.export.check_export", lambda *_: None)
    for place in ("a" * 300, "/proc/net.pt2", "run/config.yaml/net"):
        with pytest.raises(TrainingError, match=r"cannot write: .*; use a different --out"):
            export_saved(saved, "torch", Path(place))
    assert left(trained) == []


def test_a_model_that_cannot_be_traced_is_told(saved, trained, monkeypatch):
    monkeypatch.setattr(
        to_torch.SingleOutput, "forward", lambda self, x: x.new_tensor(float(x.sum()) > 1 and x.tolist())
    )
    with pytest.raises(UsageError, match=r"torch.export cannot trace the model: .*; export only the weights with --to"):
        export_saved(saved, "torch")
    assert left(trained) == []


def test_outputs_are_compared_with_what_roundings_may_do(saved, trained, monkeypatch):
    model, inputs = saved.build_model(), (torch.ones(2, 1, 8, 8),)
    outputs = model(*inputs)
    monkeypatch.setattr("lockstep.exports.check._run_export", lambda *_: outputs * (1 + 1e-6))
    found = check_export("torch", trained, model, inputs, outputs, {}, exact=False)
    assert 0 < found.difference < found.tolerance < 1e-3
    assert "the outputs differ by " in found.description
    for wrong in (outputs * (1 + 1e-2), outputs * torch.nan, outputs[:1], outputs.double()):
        monkeypatch.setattr("lockstep.exports.check._run_export", lambda *_, wrong=wrong: wrong)
        with pytest.raises(TrainingError, match="nothing was written"):
            check_export("torch", trained, model, inputs, outputs, {}, exact=False)


class OfPair(nn.Module):
    """A model whose one input is a pair, of which the second is not aligned in the file that the check reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(3, 16)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (self.a(pair[0]) + self.b(pair[1])).relu()


def test_inputs_that_are_a_pair_come_as_they_were(tmp_path: Path) -> None:
    model, inputs, place = OfPair(), ((torch.rand(3, 4), torch.rand(3, 3)),), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(model, inputs), place)
    job = {"threads": 1, "lockstep": False}
    assert check_export("torch", place, model, inputs, model(*inputs).detach(), job, exact=True).description == EQUAL


@pytest.mark.usefixtures("_loaded")
def test_timm_makes_it_by_the_folder_alone(run, images, tmp_path):
    import timm

    model = "{name: resnet10t, source: timm, options: {drop_rate: 0.1}}"
    data = "{name: folder, root: images, image_size: 32, resize_size: 40, mean: [0.5, 0.4, 0.3]}"
    run("train", plain(tmp_path, model, data, 1, 0.01), "recipe.ema={decay: 0.5}")
    shutil.rmtree(images)  # the check is done with made samples
    found = run("export", "run", "--to", "timm", "--out", "exported")
    assert "averaged weights (ema)" in found.out
    assert f"checked with synthetic samples, because the data is not available: {EQUAL}" in found.out
    made = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True)
    config = timm.data.resolve_model_data_config(made)
    assert [*config["mean"]] == [0.5, 0.4, 0.3]
    assert ([*config["input_size"]], config["crop_pct"]) == ([3, 32, 32], 0.8)
    assert list(made.pretrained_cfg["label_names"]) == ["cat", "dog"]
    ema = load_file(tmp_path / "run" / "checkpoints" / "latest" / "ema.safetensors")
    assert all(torch.equal(each, ema[name]) for name, each in made.state_dict().items())


@pytest.mark.usefixtures("_loaded")
def test_transformers_makes_an_image_classifier(run, images, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    run("train", plain(tmp_path, VIT, "{name: folder, root: images, image_size: 8, resize_size: 10}", 1, 0.01))
    assert EQUAL in run("export", "run", "--to", "transformers", "--out", "exported").out
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    assert model.config.id2label == {0: "cat", 1: "dog"}
    processor = AutoImageProcessor.from_pretrained(tmp_path / "exported")
    assert processor(torch.zeros(3, 30, 40), return_tensors="pt")["pixel_values"].shape == (1, 3, 8, 8)
    assert EQUAL in run("export", "run", "--to", "safetensors").out
    told = run("export", "run", "--to", "timm", code=2).err
    assert "model vit is not a timm model; use --to transformers, --to torch or" in told


@pytest.mark.usefixtures("_loaded")
def test_transformers_makes_a_language_model_with_its_tokenizer(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "text.txt").write_text("Grüße\tan\nalle, 漢字. " * 30)
    data = "{name: text, root: text.txt, options: {context: 12, by: character}}"
    run("train", plain(tmp_path, LLAMA + "}", data, 1, 0.01))
    assert EQUAL in run("export", "run", "--to", "transformers", "--out", "exported").out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert tokenizer.decode(tokenizer.encode("alle\tan\n漢 Grüße")) == "alle\tan\n漢 Grüße"
    prompt = tokenizer("Grüße", return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    ours = run("predict", "run", "--prompt", "Grüße", "--tokens", "5").out
    assert tokenizer.decode(found[0]) + "\n" == ours
