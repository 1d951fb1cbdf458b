"""Each corruption against a plain form of its definition on the same random numbers; the noise's distributions."""

import functools
import json
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

from vitmods.papers.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, TABLES, corruption, strength, table_side
from vitmods.papers.corruptions.functions import Draws, disk, distance, edges, read_textures, scattered

from . import plain_corruptions as plain
from .corruption_images import drawn as picture

SIZES = ((3, 32, 32), (3, 64, 50), (3, 121, 124), (1, 33, 48))


def record(draws, drawn):
    """Keep what is drawn: copies, since corruptions may work in place."""

    def kept(method):
        def draw(*arguments, **bounds):
            drawn.append(method(*arguments, **bounds))
            return drawn[-1].clone()

        return draw

    for name in ("normal", "uniform", "integers", "poisson"):
        setattr(draws, name, kept(getattr(draws, name)))
    return draws


class Replayed:
    """Gives one image's recorded numbers again, in the same order and of the same shape."""

    def __init__(self, drawn, position):
        self.numbers = iter([numbers[position].numpy() for numbers in drawn])

    def normal(self, *shape):
        numbers = next(self.numbers)
        assert numbers.shape == shape
        return numbers

    def uniform(self, *shape, low=0.0, high=1.0):
        numbers = self.normal(*shape)
        assert (numbers >= low).all()
        assert (numbers <= high).all()
        return numbers

    def integers(self, low, high, *shape):
        numbers = self.uniform(*shape, low=low, high=high - 1)
        return numbers

    def poisson(self, rates):
        return self.normal(*rates.shape)


def plain_textures(folder, scale):
    """As OpenCV resizes them for small images: every fifth pixel at a scale of 0.2, or whole."""
    texture = [np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) for path in sorted(folder.iterdir())]
    step = round(1 / scale)
    return [t[:, step // 2 :: step, step // 2 :: step] for t in texture]


def both(name, severity, images, textures):
    """(ours, plain) on the same random numbers."""
    numbers = strength(name, severity, min(images.shape[-2:]))
    drawn = []
    draws = record(Draws(range(7, 7 + len(images))), drawn)
    actual = corruption(name, textures)(images, draws, *numbers)
    form = getattr(plain, name)
    if name == "frost":
        form = functools.partial(form, textures=plain_textures(textures, numbers[2]))
    expected = [form(image.numpy(), numbers, Replayed(drawn, i)) for i, image in enumerate(images)]
    return actual, torch.from_numpy(np.stack(expected))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CORRUPTIONS + EXTRA)
def test_equals_the_plain_form(textures, name, size):
    channels, *sides = size
    if (name == "frost" and (channels == 1 or table_side(min(sides)) == 64)) or (name == "saturate" and channels == 1):
        pytest.skip("gray frost and a scale of 0.3 have tests of their own, gray images do not saturate")
    one = picture(*sides)[:channels]
    images = torch.from_numpy(np.stack([one, one[::-1, ::-1].copy()]))
    for severity in SEVERITIES:
        actual, expected = both(name, severity, images, textures)
        assert torch.equal(actual, expected), severity


def test_frost_on_gray_images_is_the_gray_of_frost(textures):
    images = torch.from_numpy(picture(130, 130)[None, :1])
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
            assert texture.shape[1] >= shape[1]
            assert texture.shape[2] >= shape[2]


def test_kernels_of_defocus_and_glass():
    assert disk(6, 0.5).sum().item() == pytest.approx(1)
    assert disk(6, 0.5).shape == (15, 15)  # 13 and a smoothing pixel on each side
    assert disk(0.3, 0.4).shape == (3, 3)
    assert disk(8, 0.5).sum() > 1.005  # as published: mirrored at the border of the 17 x 17 grid
    # Row by row backwards, each pixel takes its right neighbor's value: the last one's goes all the way.
    offsets = torch.zeros(1, 2, 4, 4, dtype=torch.int64)
    offsets[:, 1] = 1  # within reach 2, of 8 x 8 pixels
    source = scattered(offsets, 8, 8).view(8, 8)
    assert source[3, 3:7].tolist() == [31] * 4
    assert source[0].tolist() == list(range(8))


@pytest.mark.parametrize("seed", range(8))
def test_edges_and_distances_on_any_image(seed):
    """Noise has edges in every direction; smoothed noise has long ones that hysteresis must follow."""
    noise = np.random.default_rng(seed).integers(0, 256, (19, 31)).astype(float)
    drops = np.floor(plain.blurred(noise[None], seed / 4)[0])
    edge = edges(torch.from_numpy(drops)[None, None])
    expected = plain.canny(drops.astype(int))
    assert expected.any()
    np.testing.assert_array_equal(edge[0, 0].numpy(), expected)
    sparse = edge & (torch.arange(31) % 13 == seed)
    np.testing.assert_allclose(distance(sparse)[0, 0], np.minimum(plain.chamfer(sparse[0, 0].numpy()), 20))


def flat(level, count=4):
    return torch.full((count, 3, 128, 128), level, dtype=torch.uint8)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_the_published_distribution(severity):
    """Over 196,608 values; on gray, where hardly anything is clipped."""

    def noisy(name, level):
        numbers = strength(name, severity, 128)
        return corruption(name, None)(flat(level), Draws(range(4)), *numbers).double(), numbers[0]

    done, amount = noisy("impulse_noise", 100)
    assert (done == 0).double().mean().item() == pytest.approx(amount / 2, rel=0.05)
    assert (done == 255).double().mean().item() == pytest.approx(amount / 2, rel=0.05)
    assert ((done == 0) | (done == 255) | (done == 100)).all()
    done, full = noisy("shot_noise", 51)
    assert set((done * full / 255).add(0.5).floor().unique().tolist()) <= set(range(40))
    assert (done / 255).mean().item() == pytest.approx(0.2, abs=0.004 + 0.05 * (full < 10))
    spread = {"gaussian_noise": 1.0, "speckle_noise": 0.5}
    for name, scale in spread.items():
        done, std = noisy(name, 128)
        inner = ((done / 255 - 0.5).abs() < std * scale).double().mean().item()
        expected = 0.6827 if std * scale < 0.5 else 1
        assert inner == pytest.approx(expected, abs=0.02)


def test_published_tables_have_five_rows_for_every_side():
    assert tuple(TABLES) == CORRUPTIONS + EXTRA
    assert crc32(json.dumps(TABLES, sort_keys=True).encode()) == 2268310944, "other numbers than those published"
    for tables in TABLES.values():
        assert list(tables) == ["32", "64", "224"]
        assert all(len(rows) == 5 for rows in tables.values())
        assert len({len(row) if isinstance(row, list) else 1 for rows in tables.values() for row in rows}) == 1


@pytest.mark.parametrize(("side", "table"), [(8, 32), (32, 32), (45, 32), (46, 64), (119, 64), (120, 224), (384, 224)])
def test_the_nearest_table_serves(side, table):
    assert table_side(side) == table
    assert strength("jpeg_compression", 1, side) == {32: (80,), 64: (65,), 224: (25,)}[table]
