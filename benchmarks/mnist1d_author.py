"""Trains a model of MNIST-1D's authors as their notebook mnist1d-classification does, with their own files.

    python -m benchmarks.mnist1d_author CHECKOUT CLASS STEPS

Prints the test accuracies of the evaluations as JSON in the last line.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from mnist1d.data import get_dataset_args, make_dataset
from mnist1d.utils import set_seed


def main(checkout: str, kind: str, steps: int) -> None:
    """Do what the notebook does, on the data that the package makes."""
    sys.path.insert(0, f"{checkout}/notebooks")
    models, training = import_module("models"), import_module("train")
    data = make_dataset(get_dataset_args())
    arguments = training.get_model_args()
    arguments.total_steps = steps
    set_seed(arguments.seed)
    sizes = {} if kind == "ConvBase" else {"input_size": arguments.input_size}
    model = getattr(models, kind)(output_size=arguments.output_size, **sizes)
    found = training.train_model(data, model, arguments)
    print(json.dumps([float(each) for each in found["test_acc"]]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
