"""A standalone program that loads an export without Lockstep, as a user would, and runs its model.

Run it as `python as_user.py FORMAT PATH JOB`. The folder JOB contains inputs.safetensors and job.json, and the program
writes outputs.safetensors into this folder. To build a model that Lockstep or user code defines, the program imports
that code.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# torch has no public API for its pytrees.
from torch.utils import _pytree as pytree


def main(format_name: str, path: str, job_folder: str) -> None:
    """Load the export at `path` in the format `format_name`, run the model, and write its outputs to `job_folder`."""
    sys.path[0] = os.getcwd()  # replaces the folder of this file
    folder = Path(job_folder)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    if not job["lockstep"]:
        sys.modules["lockstep"] = None  # type: ignore[assignment]  # makes `import lockstep` raise ImportError
    # Clone the tensors, because kernels may sum in a different order if a tensor isn't aligned to a cache line.
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "inputs.safetensors").items()}
    leaves = [tensors[str(number)] for number in range(len(tensors))]
    inputs = pytree.tree_unflatten(leaves, pytree.treespec_loads(job["inputs"]))
    loaders: dict[str, Any] = {
        "safetensors": run_safetensors,
        "torch": run_program,
        "onnx": run_onnx,
        "transformers": run_transformers,
        "timm": run_timm,
    }
    with torch.no_grad():
        outputs = loaders[format_name](Path(path), inputs, job)
    save_file({"outputs": outputs.contiguous()}, folder / "outputs.safetensors")


def run_safetensors(path: Path, inputs: Any, job: dict[str, Any]) -> torch.Tensor:
    """Build the model from the metadata of the file, load its weights, and return its output."""
    with safe_open(path, "pt") as file:
        build = json.loads(file.metadata()["build"])
    if "config" in build:
        library = import_module("transformers")
        config = library.AutoConfig.for_model(**build["config"])
        model = getattr(library, build["class"])(config)
    else:
        module, _, function = build["function"].partition(":")
        factory: Any = import_module(module)
        for part in function.split("."):
            factory = getattr(factory, part)
        model = factory(*build["arguments"], **build["options"])
    model.load_state_dict(load_file(path))
    return _get_output_tensor(_call_model(model.eval(), inputs))


def run_program(path: Path, inputs: Any, job: dict[str, Any]) -> torch.Tensor:
    """Load and run a torch.export program, which takes positional inputs."""
    module: Any = torch.export.load(path).module()
    arguments = list(inputs.values()) if isinstance(inputs, dict) else inputs
    outputs: torch.Tensor = module(*arguments)
    return outputs


def run_onnx(path: Path, inputs: Any, job: dict[str, Any]) -> torch.Tensor:
    """Run the model with onnxruntime on the CPU."""
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = job["threads"]
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    arrays = [tensor.numpy() for tensor in pytree.tree_leaves(inputs)]
    names = [value.name for value in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, arrays, strict=True)))[0])


def run_transformers(path: Path, inputs: Any, job: dict[str, Any]) -> torch.Tensor:
    """Load the model from a folder using the Auto classes of transformers, and run it.

    If there is a tokenizer or an image processor, its tokens or its normalization are checked as well.
    """
    library = import_module("transformers")
    if job.get("text") is not None:
        ids = library.AutoTokenizer.from_pretrained(path).encode(job["text"], add_special_tokens=False)
        if ids != job["ids"]:
            raise SystemExit("the tokenizer returns different tokens than the tokenizer of the run")
    if job.get("pixels") is not None:
        _check_image_processor(library.AutoImageProcessor.from_pretrained(path), job["pixels"])
    model = getattr(library, job["class"]).from_pretrained(path, dtype=torch.float32)
    return _get_output_tensor(_call_model(model.eval(), inputs))


def run_timm(path: Path, inputs: Any, job: dict[str, Any]) -> torch.Tensor:
    """Build the model from the folder alone, run it, and check that its labels and normalization match the run."""
    library = import_module("timm")
    model = library.create_model(f"local-dir:{path}", pretrained=True).eval()
    data = library.data.resolve_model_data_config(model)
    for key in ("mean", "std", "input_size"):
        if job[key] is not None and list(data[key]) != job[key]:
            raise SystemExit(f"{key} is {data[key]}, but the run has {job[key]}")
    if list(model.pretrained_cfg["label_names"] or ()) != job["classes"]:
        raise SystemExit("the class names differ from those of the run")
    return _get_output_tensor(_call_model(model, inputs))


def _check_image_processor(processor: Any, settings: dict[str, Any]) -> None:
    size = (settings["size"], settings["size"], 3)
    picture = torch.arange(size[0] * size[1] * 3, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(size)
    pixels = processor(picture.numpy(), do_resize=False, return_tensors="pt")["pixel_values"][0]
    mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("mean", "std"))
    expected = (picture.permute(2, 0, 1).double() / 255 - mean) / std
    if pixels.shape != expected.shape or not torch.allclose(pixels.double(), expected, atol=1e-5):
        raise SystemExit("the image processor normalizes differently than the run")


def _call_model(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def _get_output_tensor(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return outputs
    output: torch.Tensor = outputs["logits"] if "logits" in outputs else outputs["out"]
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
