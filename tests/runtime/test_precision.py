"""The forward pass runs in the precision asked for, gradients of fp16 are scaled, and kernels are fixed."""

from collections.abc import Iterator

import pytest
import torch

from lockstep.runtime.precision import Precision, autocast, fix_kernels, loss_scaler

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_product_has_the_precision_asked_for_each_time(precision: Precision, dtype: torch.dtype) -> None:
    context, matrix = autocast(precision, CPU), torch.ones(2, 2)
    for _ in range(2):
        with context:
            assert (matrix @ matrix).dtype == dtype
        assert (matrix @ matrix).dtype == torch.float32


@pytest.mark.parametrize(("precision", "enabled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_is_scaled(precision: Precision, enabled: bool) -> None:
    scaler = loss_scaler(precision, CPU, 8.0, 2)
    assert scaler.is_enabled() is enabled
    assert scaler.scale(torch.tensor(3.0)).item() == (24.0 if enabled else 3.0)


def test_a_scaler_is_ready_before_it_has_scaled_a_loss() -> None:
    """A rank without a micro-batch in its first step takes part in the update all the same."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([8.0])
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = loss_scaler("fp16", CPU, 8.0, 1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 0.5
    assert scaler.get_scale() == 16.0  # grows after an interval of 1


@pytest.fixture
def _kernels_as_before() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_kernels_as_before")
def test_kernels_are_fixed() -> None:
    fix_kernels(2)
    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.benchmark is False
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.functional.max_unpool2d(
            torch.ones(1, 1, 1, 1, requires_grad=True), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2
        )
