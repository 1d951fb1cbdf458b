"""Corruptions as users call them: the same in any batch and at any time; each against a plain form of its definition on
the same random numbers; the noise's distributions; bad input."""

import functools
import json
import os
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

from vitmods.papers.corruptions import (  # fmt: skip
    CORRUPTIONS,
    EXTRA,
    SEVERITIES,
    TABLES,
    check_corruptions,
    corrupt,
    corruption,
    strength,
    table_side,
)
from vitmods.papers.corruptions.functions import FILES, Draws, read_textures
from vitmods.util.errors import UserError

from . import plain_corruptions as plain

ALL = CORRUPTIONS + EXTRA
FIXED = "defocus_blur zoom_blur brightness contrast pixelate jpeg_compression gaussian_blur saturate".split()  # noqa: SIM905


def drawn(height, width):
    """An image (3, H, W) of slopes, stripes, a disk and flat black, white and gray."""
    y, x = np.mgrid[:height, :width]
    v, u = y / height, x / width
    disk = (v - 0.4) ** 2 + (u - 0.6) ** 2 < 0.06
    stripes = ((x // max(1, width // 16)) + (y // max(1, height // 8))) % 2
    planes = np.stack([u, v, 0.5 + 0.4 * np.sin(9 * u + 5 * v)])
    planes = np.where(disk, np.array([0.9, 0.25, 0.1])[:, None, None], planes)
    planes = np.where(v > 0.75, stripes * np.array([0.8, 0.9, 0.7])[:, None, None], planes)
    planes = np.where((v < 0.2) & (u < 0.45), np.floor(u / 0.15) / 2, planes)
    return (planes * 255).astype(np.uint8)


@pytest.fixture(scope="module")
def textures(tmp_path_factory):
    """A folder with five made-up frost textures, larger than 224 pixels."""
    folder = tmp_path_factory.mktemp("frost")
    for k, name in enumerate(FILES, 1):
        y, x = np.mgrid[: 260 + 40 * k, : 380 + 50 * k]
        waves = np.stack([np.sin(x / (2 + k) + c) * np.cos(y / (3 + k) - x / 31 + c) for c in range(3)], -1)
        Image.fromarray((190 + 5 * k + 40 * waves).astype(np.uint8)).save(folder / name, quality=95)
    return folder


@pytest.mark.parametrize("name", ALL)
def test_an_image_does_not_depend_on_its_batch(textures, name):
    """Of eight images, of which five are worked on at once."""
    one = torch.from_numpy(drawn(128, 128))
    images = torch.stack([one.roll((9 * i, 31 * i), (1, 2)) for i in range(8)])
    index, kept, severity = torch.tensor([5, 0, 3, 900, 7, 8, 11, 2]), images.clone(), 1 + ALL.index(name) % 5
    together = corrupt(images, name, severity, seed=3, index=index, textures=textures)
    assert (together.shape, together.dtype) == (images.shape, torch.uint8)
    assert together.is_contiguous()
    assert torch.equal(images, kept)
    for i in (0, 6):
        alone = corrupt(images[i : i + 1], name, severity, seed=3, index=index[i : i + 1].numpy(), textures=textures)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("name", ALL)
def test_draws_differ_by_index_and_seed_where_there_are_any(textures, name):
    images = torch.from_numpy(drawn(64, 64))[None].expand(2, -1, -1, -1)

    def done(seed, index):
        return corrupt(images, name, 2, seed=seed, index=np.array(index), textures=textures)

    first = done(0, [4, 5])
    assert not torch.equal(first, images)
    assert torch.equal(first, done(0, [4, 5]))
    assert torch.equal(done(0, [5, 4]), first.flip(0))
    assert torch.equal(first[0], first[1]) == (name in FIXED)
    assert torch.equal(done(1, [4, 5])[0], first[0]) == (name in FIXED)
    none = torch.zeros(0, 3, 32, 32, dtype=torch.uint8)
    assert corrupt(none, name, 1, seed=0, index=np.arange(0), textures=textures).shape == (0, 3, 32, 32)


def test_severities_have_noise_of_their_own():
    gray = torch.full((1, 3, 64, 64), 128, dtype=torch.uint8)
    weak, two = (corrupt(gray, "gaussian_noise", s, seed=0, index=np.array([0])).double() - 128 for s in (1, 2))
    assert abs(np.corrcoef(weak.flatten(), two.flatten())[0, 1]) < 0.05


@pytest.mark.parametrize("name", ALL)
def test_small_long_and_gray_images(textures, name):
    for shape in ((3, 8, 8), (3, 9, 200), (3, 200, 11), (1, 28, 28)):
        images = torch.randint(0, 256, (2, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        for severity in (1, 5) if (name, shape[0]) != ("saturate", 1) else ():  # which is refused
            done = corrupt(images, name, severity, seed=0, index=np.arange(2), textures=textures)
            assert done.shape == images.shape
            if (name, severity, min(shape[1:])) != ("zoom_blur", 1, 8):  # an eighth of 8 pixels is less than one
                assert not torch.equal(done, images)


# Each against its definition


class PlainDraws:
    """The draws of one image, as arrays."""

    def __init__(self, seed):
        self.draws = Draws([seed])

    def __getattr__(self, name):
        def draw(*arguments, **bounds):
            tensors = [torch.from_numpy(a)[None] if isinstance(a, np.ndarray) else a for a in arguments]
            return getattr(self.draws, name)(*tensors, **bounds)[0].numpy()

        return draw


def plain_textures(folder, scale):
    """As OpenCV resizes them for small images: every fifth pixel at a scale of 0.2, or whole."""
    texture = [np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) for path in sorted(folder.iterdir())]
    step = round(1 / scale)
    return [t[:, step // 2 :: step, step // 2 :: step] for t in texture]


@pytest.mark.parametrize("size", [(3, 32, 32), (3, 64, 50), (3, 121, 124), (1, 33, 48)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_equals_the_plain_form(textures, name, size):
    channels, *sides = size
    if (name == "frost" and (channels == 1 or table_side(min(sides)) == 64)) or (name == "saturate" and channels == 1):
        pytest.skip("gray frost and a scale of 0.3 have tests of their own, gray images do not saturate")
    one, form = drawn(*sides)[:channels], getattr(plain, name)
    images = torch.from_numpy(np.stack([one, one[::-1, ::-1].copy()]))
    for severity in SEVERITIES if max(sides) < 100 else (1, 4):
        numbers = strength(name, severity, min(sides))
        actual = corruption(name, textures)(images, Draws([7, 8]), *numbers)
        if name == "frost":
            form = functools.partial(plain.frost, textures=plain_textures(textures, numbers[2]))
        expected = [form(image.numpy(), numbers, PlainDraws(seed)) for seed, image in zip((7, 8), images)]
        assert torch.equal(actual, torch.from_numpy(np.stack(expected))), severity


def test_frost_on_gray_images_is_the_gray_of_frost(textures):
    images = torch.from_numpy(drawn(130, 130)[None, :1])
    in_gray, in_color = (
        corruption("frost", textures)(p, Draws([1]), 0.6, 0.4, 1) for p in (images, images.expand(-1, 3, -1, -1))
    )
    expected = plain.gray(in_color[0].double().numpy())
    assert np.abs(in_gray[0].numpy() - expected).max() <= 1.5  # two roundings


def test_textures_of_other_sizes_than_the_images(textures):
    """Bilinear between pixel centers, without antialiasing."""
    texture = read_textures(textures, 0.3, (3, 64, 64))[0]
    full = np.asarray(Image.open(textures / "frost1.png")).astype(float)
    assert texture.shape == (3, 90, 129)
    for y, x in ((0, 0), (10, 20), (89, 128)):
        at, across = (y + 0.5) / 0.3 - 0.5, (x + 0.5) / 0.3 - 0.5
        (top, v), (left, u) = (divmod(at, 1), divmod(across, 1))
        four = full[int(top) : int(top) + 2, int(left) : int(left) + 2]
        value = (np.array([1 - v, v])[:, None, None] * np.array([1 - u, u])[:, None] * four).sum((0, 1))
        assert np.abs(texture[:, y, x].numpy() - value).max() <= 0.5 + 1e-6
    for scale, shape in ((1, (3, 600, 500)), (0.2, (3, 40, 300)), (1, (1, 300, 1000))):
        for texture in read_textures(textures, scale, shape):
            assert texture.shape[0] == shape[0]
            assert np.greater_equal(texture.shape[1:], shape[1:]).all()


@pytest.mark.parametrize("severity", [1, 5])
def test_noise_has_the_published_distribution(severity):
    """Over 196,608 values; on gray, where hardly anything is clipped."""

    def noisy(name, level):
        numbers, flat = strength(name, severity, 128), torch.full((4, 3, 128, 128), level, dtype=torch.uint8)
        return corruption(name, None)(flat, Draws(range(4)), *numbers).double(), numbers[0]

    done, amount = noisy("impulse_noise", 100)
    assert (done == 0).double().mean().item() == pytest.approx(amount / 2, rel=0.05)
    assert (done == 255).double().mean().item() == pytest.approx(amount / 2, rel=0.05)
    assert ((done == 0) | (done == 255) | (done == 100)).all()
    done, full = noisy("shot_noise", 51)
    assert set((done * full / 255).add(0.5).floor().unique().tolist()) <= set(range(40))
    assert (done / 255).mean().item() == pytest.approx(0.2, abs=0.004 + 0.05 * (full < 10))
    for name, scale in {"gaussian_noise": 1.0, "speckle_noise": 0.5}.items():
        done, std = noisy(name, 128)
        inner = ((done / 255 - 0.5).abs() < std * scale).double().mean().item()
        assert inner == pytest.approx(0.6827 if std * scale < 0.5 else 1, abs=0.02)


def test_the_published_tables_of_which_the_nearest_serves():
    assert crc32(json.dumps(TABLES, sort_keys=True).encode()) == 2268310944, "other numbers than those published"
    sides = {8: 32, 32: 32, 45: 32, 46: 64, 119: 64, 120: 224, 384: 224}
    assert {side: table_side(side) for side in sides} == sides
    for side, table in sides.items():
        assert strength("jpeg_compression", 1, side) == {32: (80,), 64: (65,), 224: (25,)}[table]


IMAGE = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(("name", "severity", "images", "words"), [
    ("gausian_noise", 1, IMAGE, "Did you mean 'gaussian_noise'"),
    ("jpeg", 1, IMAGE, "jpeg_compression"),
    *(("fog", severity, IMAGE, f"from 1 to 5, not {severity}") for severity in (0, 6, True, 2.5)),
    ("fog", 1, IMAGE.float(), "uint8"),
    ("fog", 1, IMAGE[0], r"\(3, 32, 32\)"),
    ("fog", 1, IMAGE[:, :2], "1 or 3 channels"),
    ("fog", 1, IMAGE[..., :7], "at least 8 pixels"),
    ("fog", 1, torch.cat([IMAGE, IMAGE]), "2 images came with 1 indices"),
    ("saturate", 1, IMAGE[:, :1], "needs color"),
])  # fmt: skip
def test_bad_input_has_one_clear_error(name, severity, images, words):
    with pytest.raises(UserError, match=words):
        corrupt(images, name, severity, seed=0, index=np.arange(1))


def test_frost_says_which_files_go_where_and_which_is_broken(tmp_path, textures, monkeypatch):
    monkeypatch.delenv("VITMODS_FROST", raising=False)
    check_corruptions([name for name in ALL if name != "frost"])
    where = r"a folder with frost1.png, frost2.png.*, named by textures .* or VITMODS_FROST"
    with pytest.raises(UserError, match=where):
        check_corruptions(ALL)
    (tmp_path / "frost2.png").write_bytes(b"")
    with pytest.raises(UserError, match=f"cannot find frost1.png, frost3.png, frost4.jpg, frost5.jpg in {tmp_path}"):
        check_corruptions(["frost"], textures=tmp_path)
    with pytest.raises(UserError, match=r"cannot find frost1\.png"):
        corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1), textures=tmp_path)
    monkeypatch.setenv("VITMODS_FROST", str(textures))
    check_corruptions(ALL)
    assert corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1)).any()
    for name in FILES:
        (tmp_path / name).write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"frost1.png cannot be read .* Copy it anew"):
        corrupt(IMAGE, "frost", 1, seed=0, index=np.arange(1), textures=tmp_path)


def test_frost_with_the_published_textures():
    """At different places of five textures; it brightens, turns blue, and does more harm at every severity."""
    folder = Path(os.environ.get("VITMODS_DATA") or "none") / "frost_textures"
    if not folder.is_dir():
        pytest.skip("VITMODS_DATA does not name a folder with frost_textures")
    clean = torch.from_numpy(drawn(64, 64)).expand(24, -1, -1, -1)
    arguments = {"seed": 0, "index": np.arange(24), "textures": folder}
    done = torch.stack([corrupt(clean, "frost", severity, **arguments) for severity in SEVERITIES]).double()
    errors = (done - clean).square().mean((1, 2, 3, 4)).tolist()
    assert errors == sorted(errors)
    means = done[4].mean((0, 2, 3)) - clean.double().mean((0, 2, 3))
    assert 20 < means[0] < means[2]
    assert len({round(float(p.mean()), 4) for p in done[4]}) == 24
