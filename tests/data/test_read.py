"""Every kind of image file is read right or refused with a reason."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vitmods.data.read import Unreadable, decode, shown_size

from .support import encoded, noise


def gradient(height=10, width=14):
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows * 20, columns * 15, rows * 0 + 90], -1).astype(np.uint8))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF", "GIF", "WEBP"])
def test_lossless_formats_come_back_exactly(kind):
    source = gradient()
    pixels = decode(encoded(source, kind, **({"lossless": True} if kind == "WEBP" else {})), 3)
    assert pixels.shape == (3, 10, 14)
    np.testing.assert_array_equal(pixels, np.asarray(source).transpose(2, 0, 1))


def test_gray_1_bit_palette_and_float_images():
    gray = gradient().convert("L")
    np.testing.assert_array_equal(decode(encoded(gray, "PNG"), 3), np.stack([np.asarray(gray)] * 3))
    np.testing.assert_array_equal(decode(encoded(gradient(), "PNG"), 1)[0], np.asarray(gray))
    black_white = Image.fromarray(np.eye(9, dtype=bool))
    np.testing.assert_array_equal(decode(encoded(black_white, "PNG"), 1)[0], np.eye(9, dtype=np.uint8) * 255)
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    assert decode(encoded(palette, "PNG"), 3)[:, 0, 0].tolist() == [200, 100, 50]
    image = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert decode(encoded(image, "TIFF"), 1)[0].tolist() == [[0, 128, 255]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_shown_on_white(mode):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 255))
    image.putpixel((1, 2), (10, 20, 30, 0))
    options = {"transparency": 0} if mode == "P" else {}
    if mode == "P":
        image = Image.fromarray(np.ones((4, 4), np.uint8)).convert("P")
        image.putpalette([10, 20, 30, 10, 20, 30])
        image.putpixel((1, 2), 0)
    pixels = decode(encoded(image.convert(mode), "PNG", **options), 3)
    assert pixels[:, 2, 1].tolist() == [255, 255, 255]
    assert pixels[:, 0, 0].max() < 40


def test_half_transparent_is_half_white_and_cmyk_has_its_colors():
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decode(encoded(image, "PNG"), 3)[0, 0, 0] == 127
    pixels = decode(encoded(Image.new("RGB", (16, 16), (220, 40, 30)).convert("CMYK"), "JPEG", quality=95), 3)
    np.testing.assert_allclose(pixels[:, 8, 8], [220, 40, 30], atol=6)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_not_clipped(kind):
    values = np.array([[0, 257, 32896], [65535, 128, 129]], dtype=np.uint16)
    pixels = decode(encoded(Image.fromarray(values), kind), 1)[0]
    np.testing.assert_array_equal(pixels, [[0, 1, 128], [255, 0, 1]])


def test_16_bit_rgb_png_is_scaled():
    rows = b"".join(b"\0" + struct.pack(">6H", 65535, 32896, 0, 257, 0, 65535) for _ in range(2))

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">2I5B", 2, 2, 16, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert decode(png, 3)[:, 0].T.tolist() == [[255, 128, 0], [1, 0, 255]]


@pytest.mark.parametrize(("orientation", "turn"), [(3, 2), (6, 3), (8, 1)])
def test_exif_orientation_is_applied(orientation, turn):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = decode(encoded(gradient(), "PNG", exif=exif), 3)
    np.testing.assert_array_equal(pixels, np.rot90(np.asarray(gradient()), turn).transpose(2, 0, 1))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_matter_and_animations_give_their_first_frame():
    jpeg = encoded(gradient(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode(jpeg, 3).shape == (3, 10, 14)
    frames = [Image.new("L", (5, 5), value) for value in (10, 200)]
    assert decode(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), 1).max() == 10


BEYOND_16_BITS = (
    np.array([[-3, 70_000]], np.int32),
    np.array([[0.0, 7.0]], np.float32),
    np.array([[np.nan]], np.float32),
)
REFUSED = [
    (b"Dear diary, this is a text named .jpg\n", "not an image"),
    (b"", "0 bytes"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "not an image"),  # PIL would run Ghostscript on this
    *((encoded(Image.fromarray(values), "TIFF"), "save it with 8 or 16 bits") for values in BEYOND_16_BITS),
    *(
        (raw[: int(len(raw) * part)], "")
        for raw in (encoded(noise(0, (64, 64)), kind) for kind in ("JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"))
        for part in (0.03, 0.5, 0.97)
    ),
]


@pytest.mark.parametrize(("raw", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_an_image_is_refused_for_its_pixels_and_its_size(raw, message):
    with pytest.raises(Unreadable, match=message) as by_pixels:
        decode(raw, 3)
    with pytest.raises(Unreadable) as by_size:
        shown_size(raw)
    assert str(by_size.value) == str(by_pixels.value)


def test_decompression_bomb_is_refused_without_being_decoded(monkeypatch):
    header = struct.pack(">2I5B", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(Unreadable, match="decompression bomb"):
        decode(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT", 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # PIL itself only warns between one and two times its limit
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(Unreadable, match=r"14 x 10 pixels, more than PIL\.Image\.MAX_IMAGE_PIXELS = 100"),
    ):
        decode(encoded(gradient(), "PNG"), 3)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_size_alone_is_that_of_the_pixels(mode, orientation):
    image = gradient().convert("L") if mode == "I;16" else gradient().convert(mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 200)
    exif = Image.Exif()
    exif[274] = orientation
    raw = encoded(image, "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    assert shown_size(raw) == decode(raw, 3).shape[1:]
