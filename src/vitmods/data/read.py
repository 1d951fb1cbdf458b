"""One image: bytes -> uint8 (channels, H, W), whatever its file format and pixel format.

Orientation from EXIF is applied; transparent parts are shown on white; 16-bit values are scaled to 8 bits; of
animations the first frame is taken. What cannot be read raises Unreadable with the reason.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

# Raster formats only: PIL would start Ghostscript for an EPS file, and documents are not images.
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA", "PCX", "HEIF")
HASHED_VALUES = 1 << 20  # a millisecond
_ORIENTATION = 0x0112  # the tag of EXIF
_SUBFILE, _WIDTH, _HEIGHT, _PHOTOMETRIC = 0x00FE, 0x0100, 0x0101, 0x0106  # tags of TIFF: kind of a page, sides, meaning
_ON_ITS_SIDE = (5, 6, 7, 8)  # its values
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N")


class Unreadable(Exception):
    """This image cannot be read; the text is the reason."""


@contextmanager
def reading() -> Iterator[None]:
    """Turn any error inside into Unreadable, with a reason for people."""
    try:
        yield
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        raise Unreadable(f"looks like a decompression bomb: {error}") from error
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    except Exception as error:  # decoders raise what they like on broken files: SyntaxError, struct.error, ...
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def decode(raw: "bytes | Image.Image | NDArray[np.generic]", channels: int) -> NDArray[np.uint8]:
    """Pixels (channels, H, W); channels 3 is RGB, 1 is gray. Raises Unreadable."""
    with reading():
        return _pixels(opened(raw), channels)


def opened(raw: "bytes | Image.Image | NDArray[np.generic]") -> Image.Image:
    """The image, decoded and upright, in its own mode. Raises whatever PIL does; call it within `reading`."""
    image, limit = _open(raw), Image.MAX_IMAGE_PIXELS
    # PIL only warns up to twice its limit; an image of 90 megapixels or more is refused here at once.
    if limit is not None and image.width * image.height > limit:
        raise Unreadable(
            f"looks like a decompression bomb: {image.width} x {image.height} pixels, more than "
            f"PIL.Image.MAX_IMAGE_PIXELS = {limit:,}; VITMODS_MAX_PIXELS in the environment sets another limit"
        )
    image.load()
    try:
        # exif_transpose would copy an upright image
        return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block says nothing about the orientation; the pixels are fine
        return image


def size_in_header(raw: bytes) -> tuple[int, int]:
    """Height and width that `decode` would give, as the file says without being decoded. Raises Unreadable."""
    with reading():
        image = _open(raw)
        tags = getattr(image, "tag_v2", {})  # of TIFF, whose size PIL turns by itself
        width, height = tags.get(_WIDTH, image.width), tags.get(_HEIGHT, image.height)
        return (width, height) if image.getexif().get(_ORIENTATION, 1) in _ON_ITS_SIDE else (height, width)


def shown_size(raw: bytes) -> tuple[int, int]:
    """Height and width that `decode` would give. The image is decoded, but not converted unless that might fail.

    Raises Unreadable where `decode` would.
    """
    with reading():
        image = opened(raw)
    if image.mode in ("RGB", "L") and image.width * image.height:
        return image.height, image.width
    height, width = decode(raw, 3).shape[1:]
    return height, width


def digest(raw: "bytes | Image.Image | NDArray[np.generic]") -> bytes:
    """A hash of an image's bytes in its source: 16 bytes."""
    content = raw if isinstance(raw, bytes) else np.ascontiguousarray(np.asarray(raw)).tobytes()
    return blake2b(content, digest_size=16).digest()


def pixel_digest(image: NDArray[np.uint8]) -> bytes:
    """A hash of decoded pixels (C, H, W): 16 bytes. Of more than HASHED_VALUES equally spaced rows are hashed."""
    rows = np.ascontiguousarray(image[:, :: 1 + image.size // HASHED_VALUES])
    return blake2b(rows.data, digest_size=16, key=repr(image.shape).encode()).digest()


def _open(raw: "bytes | Image.Image | NDArray[np.generic]") -> Image.Image:
    if isinstance(raw, Image.Image):
        return raw
    if isinstance(raw, np.ndarray):
        return Image.fromarray(raw)
    if not raw:
        raise Unreadable("the file is empty (0 bytes)")
    Image.init()
    if word := os.environ.get("VITMODS_MAX_PIXELS", ""):
        Image.MAX_IMAGE_PIXELS = int(word)
    if "HEIF" not in Image.OPEN and find_spec("pillow_heif"):
        import_module("pillow_heif").register_heif_opener()
    try:
        return Image.open(io.BytesIO(raw), formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        name = format_of(raw)
        reason = _REASONS.get(name, f"not an image in a known format, but {name}: {_CONVERT}")
        raise Unreadable(reason if name else "not an image in a known format") from None


_CONVERT = "convert it to PNG or JPEG"
_DAMAGED = "is damaged, or has pixels of a kind that is not read: save it again with 8 or 16 bits"
_REASONS = {
    "HEIC": f"HEIC: install what reads it with pip install 'vitmods[heic]', or {_CONVERT}",
    "AVIF": f"AVIF, which this version of Pillow does not read: update it, or {_CONVERT}",
    "Git LFS": "not an image in a known format, but a Git LFS pointer: fetch the image with git lfs pull",
    "HTML": "not an image in a known format, but a web page (HTML): download it again",
    **{name: f"a {name} that {_DAMAGED}" for name in ("JPEG", "PNG", "GIF", "WebP", "TIFF", "JPEG 2000")},
}
_BEGINNINGS = {
    "JPEG": b"\xff\xd8\xff",
    "PNG": b"\x89PNG\r\n",
    "GIF": b"GIF8",
    "WebP": b"RIFF....WEBP",
    "TIFF": b"II[*+]\0|MM\0[*+]",
    "AVIF": b"....ftypavi[fs]",
    "HEIC": b"....ftyp(hei|hev|mif1|msf1)",
    "JPEG 2000": b"....jP  ",
    "JPEG XL": b"\xff\x0a|....JXL ",
    "a Photoshop file": b"8BPS",
    "DICOM": b".{128}DICM",
    "SVG": b"(<[?]xml[^<]*)?<svg",
    "PostScript": b"%!PS-Adobe",
    "Git LFS": b"version https://git-lfs",
    "HTML": b"\\s*<(!doctype html|html)",
}


def has_more(raw: object) -> bool:
    """Whether a file holds more images than the first: pages, or frames of an animation."""
    if not isinstance(raw, bytes) or format_of(raw) not in ("TIFF", "GIF", "WebP", "AVIF"):
        return False
    with suppress(Unreadable, EOFError), reading():
        image = _open(raw)
        image.seek(1)
        return not getattr(image, "tag_v2", {}).get(_SUBFILE, 0) & 1  # a smaller copy is none
    return False


def format_of(raw: bytes) -> str:
    """The kind of a picture, or of what is in its place, by its first bytes; "" if unknown."""
    return next(
        (name for name, begins in _BEGINNINGS.items() if re.match(begins, raw[:256], re.DOTALL | re.IGNORECASE)), ""
    )


def _pixels(image: Image.Image, channels: int) -> NDArray[np.uint8]:
    if image.width == 0 or image.height == 0:
        raise Unreadable("the image is without pixels")
    if image.mode in (*_WIDE_MODES, "I", "F"):  # full range to full range: 16-bit 0..65535, float 0..1
        values = np.asarray(image, dtype=np.float64)
        top, low, high = 1.0 if image.mode == "F" else 65535.0, float(np.min(values)), float(np.max(values))
        if not (low >= 0 and high <= top):
            outside = f"pixel values run from {low:g} to {high:g}, outside 0 to {top:g}"
            raise Unreadable(f"{outside}: save it with 8 or 16 bits")
        # PIL inverts WhiteIsZero (0) in images of 8 bits alone.
        values = top - values if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0 else values
        image = Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "RGB" if channels == 3 else "L"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if channels == 3 else pixels[None].copy()
