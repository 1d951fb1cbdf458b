"""Every kind of image file is read right or refused with a reason."""

import itertools
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from vitmods.data.read import Unreadable, decode, shown_size, size_in_header

from .support import encoded, noise


def gradient(height=10, width=14):
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows * 20, columns * 15, rows * 0 + 90], -1).astype(np.uint8))


def test_palette_float_half_transparent_and_cmyk_images():
    palette = Image.new("P", (4, 3), 1)
    palette.putpalette([0, 0, 0, 200, 100, 50])
    assert decode(encoded(palette, "PNG"), 3)[:, 0, 0].tolist() == [200, 100, 50]
    image = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert decode(encoded(image, "TIFF"), 1)[0].tolist() == [[0, 128, 255]]
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decode(encoded(image, "PNG"), 3)[0, 0, 0] == 127
    cmyk = encoded(Image.new("RGB", (16, 12), (220, 40, 30)).convert("CMYK"), "JPEG", quality=95)
    np.testing.assert_allclose(decode(cmyk, 3)[:, 8, 8], [220, 40, 30], atol=6)
    assert shown_size(cmyk) == (12, 16)


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
        (raw[: int(len(raw) * part)], ".")
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


def plain_tiff(values, photometric, orientation, order):
    """An uncompressed TIFF of stored values (H, W) or (H, W, 3), of 8 or 16 bits, written without PIL."""
    height, width, *samples = values.shape
    bits, count, end = 8 * values.itemsize, (samples or [1])[0], "<" if order == "II" else ">"
    body = values.astype(values.dtype.newbyteorder(end)).tobytes()
    entries = [
        (256, 3, width), (257, 3, height), (258, 3, bits), (259, 3, 1), (262, 3, photometric), (273, 4, 8),
        (274, 3, orientation), (277, 3, count), (278, 3, height), (279, 4, len(body)),
    ]  # fmt: skip
    table = 8 + len(body) + len(body) % 2
    raw = order.encode() + struct.pack(f"{end}HI", 42, table) + body + b"\0" * (len(body) % 2)
    raw += struct.pack(f"{end}H", len(entries))
    more = table + 2 + 12 * len(entries) + 4
    for tag, kind, value in entries:
        if tag == 258 and count > 1:  # one number for each sample does not fit its place
            raw += struct.pack(f"{end}HHII", tag, 3, count, more)
        else:
            raw += struct.pack(f"{end}HHI" + ("I" if kind == 4 else "HH"), tag, kind, 1, *[value, 0][: 1 + (kind == 3)])
    return raw + struct.pack(f"{end}I", 0) + struct.pack(f"{end}{count}H", *[bits] * count)


TURNS = {  # what a viewer does with the stored rows and columns, by the definition of the tag
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: a.swapaxes(0, 1)[:, ::-1], 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}  # fmt: skip


def cells():
    """Yield a name, a file, and its upright pixels (H, W) or (H, W, 3) of 8 bits, as the formats define them."""
    rng, exif = np.random.default_rng(0), Image.Exif()
    gray, rgb = rng.integers(0, 256, (5, 7), dtype=np.uint8), rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = np.asarray(gradient())
    for orientation, turn in TURNS.items():
        exif[0x0112] = orientation
        for order, bits, photometric in itertools.product(("II", "MM"), (8, 16), (0, 1, 2)):
            shown = rgb if photometric == 2 else gray
            stored = 255 - shown if photometric == 0 else shown
            stored = stored if bits == 8 else stored.astype(np.uint16) * 257
            yield (
                f"TIFF {order} {bits} photometric {photometric} orientation {orientation}",
                plain_tiff(stored, photometric, orientation, order),
                turn(shown),
            )
        alpha = np.full((5, 7, 1), 255, np.uint8)
        images = {
            "L": (Image.fromarray(gray), gray), "RGB": (Image.fromarray(rgb), rgb),
            "RGBA": (Image.fromarray(np.concatenate([rgb, alpha], 2)), rgb),
            "LA": (Image.fromarray(np.concatenate([gray[..., None], alpha], 2)), gray),
            "P": (Image.fromarray(gray).convert("P"), gray),
            "1": (Image.fromarray(gray > 99), 255 * (gray > 99)),
            "I;16": (Image.fromarray(gray.astype(np.uint16) * 257), gray),
        }  # fmt: skip
        for mode, (image, shown) in images.items():
            yield f"PNG {mode} orientation {orientation}", encoded(image, "PNG", exif=exif), turn(shown)
        for mode in ("RGB", "RGBA"):
            raw = encoded(images[mode][0], "WEBP", exif=exif, lossless=True, exact=True)
            yield f"WEBP {mode} orientation {orientation}", raw, turn(rgb)
        raw = encoded(Image.fromarray(smooth), "JPEG", exif=exif, quality=95, subsampling=0)
        yield f"JPEG RGB orientation {orientation}", raw, turn(smooth)
    for kind, modes in {"BMP": "L RGB 1", "GIF": "L", "PPM": "L RGB", "TGA": "L RGB", "JPEG2000": "L RGB"}.items():
        for mode in modes.split():
            yield f"{kind} {mode}", encoded(images[mode][0], kind), images[mode][1]


def test_formats_modes_orientations_and_bit_depths_are_read_as_they_are_defined():
    wrong, count = [], 0
    for name, raw, shown in cells():
        expected = np.broadcast_to(shown[..., None] if shown.ndim == 2 else shown, (*shown.shape[:2], 3))
        if name.startswith("TIFF MM 16 photometric 0"):  # PIL does not read these: not wrong, but refused
            with pytest.raises(Unreadable, match="of a kind that is not read"):
                decode(raw, 3)
            continue
        for channels in (3, 1):
            pixels = decode(raw, channels)
            want = expected if channels == 3 else np.asarray(Image.fromarray(expected.astype(np.uint8)).convert("L"))
            want = want.transpose(2, 0, 1) if channels == 3 else want[None]
            sizes = {pixels.shape[1:], shown_size(raw), size_in_header(raw), want.shape[1:]}
            tolerance = 12 if name.startswith("JPEG ") else 1 if "16" in name else 0
            if len(sizes) > 1 or np.abs(pixels.astype(int) - want).max() > tolerance:
                wrong.append((name, channels, sizes))
            count += 1
    assert wrong == []
    assert count >= 300
