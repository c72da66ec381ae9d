"""What a batch looks like: the text or the image that the user's `describe` makes of it."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..core.batches import Accumulated, Batch
from ..errors import InvalidInput

Describe = Callable[[Batch], Any]  # a text, or an image: height × width, with 1, 3 or 4 channels first or last
COLOURS = {1: 0, 3: 2, 4: 6}  # PNG's colour types by channels


@dataclass(frozen=True)
class Kept:
    """What was made of one batch, as a text: an image is a PNG in base64."""

    content: str
    is_image: bool = False

    def read(self) -> str | bytes:
        """The text, or the bytes of the PNG."""
        return base64.b64decode(self.content) if self.is_image else self.content


def kept(describe: Describe, batch: Batch) -> Kept:
    """What `describe` says of a batch; of accumulated ones, of the first. Its own failure is told in its place: an
    explanation is not lost to it."""
    if isinstance(batch, Accumulated):
        batch = batch.batches[0]
    try:
        found = describe(batch)
        if isinstance(found, str):
            return Kept(found)
        return Kept(base64.b64encode(png(_pixels(found))).decode(), is_image=True)
    except Exception as error:
        return Kept(f"describe() failed on this batch: {type(error).__name__}: {error}")


def _pixels(image: Any) -> np.ndarray:
    """Height × width × channels, 0 to 255."""
    found = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if found.ndim == 2:
        found = found[..., None]
    if found.ndim == 3 and found.shape[-1] not in COLOURS and found.shape[0] in COLOURS:
        found = np.moveaxis(found, 0, -1)
    if found.ndim != 3 or found.shape[-1] not in COLOURS or not found.size or found.dtype.kind not in "fiub":
        raise InvalidInput(
            "describe returns a text, or an image as an array of height × width, with 1, 3 or 4 channels first or "
            f"last; it returned {type(image).__name__} of shape {found.shape} ({found.dtype})"
        )
    if found.dtype.kind in "fb":
        found = 255 * np.nan_to_num(found.astype(np.float64), posinf=1.0, neginf=0.0)
    return found.clip(0, 255).round().astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of 8 bits per channel."""
    height, width, channels = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # each without filter

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
