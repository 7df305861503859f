"""Samples that are pictures, small and as PNG, for a page."""

from __future__ import annotations

import io
from base64 import b64encode
from typing import Final

import torch
from PIL import Image
from torch import Tensor

_CHANNELS: Final = (1, 3)
_SIDE: Final = 112  # pixels, at most


def are_pictures(samples: Tensor) -> bool:
    """Return whether samples are pictures: of shape [n, channels, height, width], with 1 channel or 3."""
    return samples.ndim == 4 and samples.shape[1] in _CHANNELS and min(samples.shape[2:]) > 1


def thumbnails(samples: Tensor) -> list[str]:
    """Return each picture as a data: URI; what is not uint8 is stretched, the darkest value black, the brightest white.

    Small ones are enlarged by a whole number, so each of their pixels can be seen.
    """
    return [_source(_bytes(sample)) for sample in samples]


def _bytes(sample: Tensor) -> Tensor:
    if sample.dtype == torch.uint8:
        return sample
    values = sample.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    low, high = float(values.min()), float(values.max())
    return ((values - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)


def _source(pixels: Tensor) -> str:
    values = pixels.cpu().permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    if (times := _SIDE // max(picture.size)) > 1:
        picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    picture.thumbnail((_SIDE, _SIDE))
    written = io.BytesIO()
    picture.save(written, "PNG", optimize=True)
    return f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
