"""What a `describe=` returns, as it is kept; decoded by Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from aftershock.recorder.descriptions import kept


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (3, 5, 7), (1, 5, 7), (5, 7, 4)])
def test_an_image_comes_back_to_the_pixel(shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = kept(lambda batch: batch, pixels).read()
    assert isinstance(found, bytes)
    wanted = pixels.numpy() if shape[0] == 5 else np.moveaxis(pixels.numpy(), 0, -1)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(found))).reshape(wanted.shape), wanted)


def test_what_is_no_picture_is_told() -> None:
    said = kept(lambda batch: batch, torch.zeros(2, 3, 4, 5)).read()
    assert "it returned Tensor of shape (2, 3, 4, 5)" in str(said)
