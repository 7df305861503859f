"""Converts values in user-defined samples, such as images, arrays and numbers, to tensors."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.common.type_name import describe_type


def to_tensor(value: Any) -> Tensor:
    """Convert an image, an array, a tensor or a number to a tensor. Raises TypeError for any other value.

    - PIL images are converted to arrays first. Bilevel images are converted to grayscale, and palette, CMYK and YCbCr
      images to RGB.
    - uint8 arrays of shape [height, width] or [height, width, channels] with 1, 3 or 4 channels are converted to uint8
      of shape [channels, height, width].
    - Tensors are detached. Their shape and dtype don't change.
    - Python floats and float64 arrays are converted to torch's default dtype, because float64 is rarely intended.
    """
    if isinstance(value, Tensor):
        return check_tensor(value)
    if isinstance(value, Image.Image):
        mode = {"1": "L", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}.get(value.mode, value.mode)
        value = np.array(value.convert(mode) if mode != value.mode else value)
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise TypeError(f"expected an image, an array, a tensor or a number, got {describe_type(value)}")
    array = np.array(value)  # copies the array, because torch warns if a tensor shares read-only memory
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected numbers, got an array of {array.dtype}")
    result = torch.from_numpy(_to_channels_first(array))
    return result.to(torch.get_default_dtype()) if result.dtype == torch.float64 else result


def check_tensor(value: Tensor) -> Tensor:
    """Return the detached tensor. Raises TypeError unless it is a dense tensor of real numbers on the CPU."""
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_complex() or value.is_quantized:
        raise TypeError(
            f"expected a dense tensor of real numbers on the CPU, got {value.dtype}, {value.layout} on {value.device}"
        )
    return value.detach()


def _to_channels_first(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype == np.uint8 and array.ndim == 2:
        return array[None]
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] in (1, 3, 4):
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    return array
