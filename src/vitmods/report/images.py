"""Sample images as small data URIs, so that the page needs no other file."""

from __future__ import annotations

import base64
import io

import numpy as np

SIDE = 96  # pixels of the longer side on the page's file, enough for a tile on a dense screen
MOST = 24


def thumbnails(samples: list[tuple[str, np.ndarray]]) -> list[dict[str, str | bool]]:
    """`uri`, `name` and whether the image is `small` (drawn with hard pixels) for each sample, at most 24."""
    return [{"name": name, "uri": _uri(image), "small": max(image.shape[:2]) <= SIDE} for name, image in samples[:MOST]]


def _uri(image: np.ndarray) -> str:
    from PIL import Image

    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels[..., :3] if pixels.shape[2] > 3 else pixels[..., 0]
    img = Image.fromarray(pixels)
    small = max(img.size) <= SIDE
    if not small:
        img.thumbnail((SIDE * 2, SIDE * 2))
    buffer = io.BytesIO()
    # A small image is exact as PNG; a photograph is a tenth of that as JPEG.
    if small:
        img.save(buffer, "PNG", optimize=True)
    else:
        img.convert("RGB").save(buffer, "JPEG", quality=80)
    kind = "png" if small else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
