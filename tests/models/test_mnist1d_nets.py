"""The classifiers of MNIST-1D: as large as they were published, and the same for any signals beside."""

import pytest
import torch

from lockstep.models.find import build_model

FACTS = {"classes": [str(digit) for digit in range(10)], "shape": [40]}


@pytest.mark.parametrize(
    ("name", "parameters"), [("mnist1d_logistic", 410), ("mnist1d_mlp", 15_210), ("mnist1d_cnn", 5_210)]
)
def test_each_has_the_published_size_and_scores_signals(name: str, parameters: int) -> None:
    model = build_model(name=name, dataset_info=FACTS)
    assert sum(each.numel() for each in model.parameters()) == parameters
    signals = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    scores = model(signals)
    assert scores.shape == (5, 10)
    torch.testing.assert_close(model(signals[:2]), scores[:2])


def test_the_second_layer_of_the_perceptron_is_beside_a_shortcut() -> None:
    model = build_model(name="mnist1d_mlp", options={"width": 3}, dataset_info=FACTS)
    first, second, last = (model.get_parameter(name) for name in ("0.weight", "2.linear.weight", "3.weight"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        first[0, 7], second[1, 0], last[4] = 1, 2, torch.tensor([10.0, 1.0, 0.0])
    signal = torch.zeros(1, 40)
    signal[0, 7] = 3
    assert model(signal)[0, 4] == 3 * 10 + 6  # the first layer's value itself, and twice of it
