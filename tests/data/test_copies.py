"""Near copies are named, with the grouping that keeps them together; images that are merely similar are not."""

import io
from functools import cache

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits as read_digits

from vitmods.data import loading, store
from vitmods.data.copies import SIDE, look_of, near_copies
from vitmods.data.splits import grouping_of_copies

from .support import encoded, load


def scene(seed, side=72):
    """A picture with detail at every scale, as photographs have it."""
    rng = np.random.default_rng(seed)
    layers = [
        np.asarray(Image.fromarray(rng.normal(size=(n, n)).astype(np.float32)).resize((side, side), 3)) * n**-0.7
        for n in (2, 4, 8, 16, 32)
    ]
    gray = 128 + 40 * sum(layers)[..., None] + rng.normal(size=3) * 10
    return Image.fromarray(np.clip(gray, 0, 255).astype(np.uint8))


def jpeg(image, quality):
    return Image.open(io.BytesIO(encoded(image, "JPEG", quality=quality))).convert("RGB")


def crop(image, left, top, part=0.95):
    side = round(image.width * part)
    x, y = round(left * (image.width - side)), round(top * (image.height - side))
    return image.crop((x, y, x + side, y + side))


KINDS = {
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "jpeg 50": lambda image: jpeg(image, 50),
    "jpeg 90": lambda image: jpeg(image, 90),
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "larger": lambda image: image.resize((image.width * 3, image.height * 3)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    "less contrast": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
    "gray": lambda image: image.convert("L"),
    "cropped": lambda image: crop(image, 0.5, 0.5),
    "cropped at a corner": lambda image: crop(image, 0, 1),
    "cropped and mirrored": lambda image: crop(image, 1, 0.3).transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def looks(images):
    return np.stack([look_of(np.asarray(image.convert("RGB")).transpose(2, 0, 1)) for image in images])


def near(dataset):
    return [text for text in dataset.summary()["warnings"] if "near copies" in text]


def save(root, pictures):
    """name -> image"""
    for name, image in pictures.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name)


@pytest.fixture(scope="module")
def scenes():
    return [scene(seed) for seed in range(120)]


@pytest.fixture(scope="module")
def scene_looks(scenes):
    return looks(scenes)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_found_and_other_images_are_not(kind, scenes, scene_looks):
    """Sixty of the images that are searched for are copies, sixty are not."""
    i, j = near_copies(np.concatenate([looks(map(KINDS[kind], scenes[:60])), scene_looks[60:]]), scene_looks[:60])
    assert (i == j).all()
    assert 57 <= len(i) <= 60


@pytest.mark.parametrize(("kind", "made"), [("mirrored", 0), ("jpeg 50", 1), ("brighter", 1), ("cropped", 0)])
def test_a_warning_names_examples_and_the_grouping(kind, made, tmp_path, scenes):
    for number, image in enumerate(scenes[:48]):
        train, test = (f"{'' if made else f'{split}/'}{'ab'[number % 2]}/{number:02d}" for split in ("train", "test"))
        save(tmp_path, {f"{train}.png": image})
        if number % 4 == 0:
            save(tmp_path, {f"{test}_b{number % 3}.png": KINDS[kind](image)})
    (warning,) = near(load(tmp_path, val_fraction=None if made else 0.0))
    assert "of training images (" in warning
    assert warning.count(" ~ ") == 3  # and a number of the others
    assert ("or join the splits" in warning) is (not made)
    group_by = warning.partition("--group-by '")[2].partition("'")[0]
    assert warning.endswith("(48 groups).")
    if made:
        grouped = load(tmp_path, group_by=group_by)
        assert near(grouped) == []
        assert {split.name for split in grouped.splits.values()} == {"train", "val", "test"}
    else:
        assert warning.startswith("12 of 12 images of test are near copies")


def test_augmented_copies_of_one_source(tmp_path):
    """Three copies of each photo share the text before .rf. and nothing else."""
    for number in range(16):
        for i, kind in enumerate(("mirrored", "brighter", "jpeg 90")):
            name = f"IMG-{number % 8:05d}_png.rf.{(7919 * (number % 8) + i) * 104729:09x}.png"
            save(tmp_path, {f"{'cat' if number < 8 else 'dog'}/{name}": KINDS[kind](scene(number, 32))})
    warnings = load(tmp_path).summary()["warnings"]
    pattern = r"([^/]+)\.rf\.[^/]+$"
    assert sum(f"--group-by '{pattern}'" in text for text in warnings) == 2  # by names and by pixels
    assert not near(load(tmp_path, group_by=pattern))


NAMES = {
    "{n}.jpg {n}_aug1.jpg {n}_aug2.jpg": True,
    "{n}.jpg {n}_flip.jpg {n}_bright.jpg {n}_flip_bright.jpg": True,
    "{n}.jpg {n}~(1).jpg": True,
    "{n}.jpg {n}~-~Copy.jpg {n}-copy.png": True,
    "{n}.jpg flip_{n}.jpg": True,
    "{n}_jpg.rf.{h}0.jpg {n}_jpg.rf.{h}1.jpg": True,
    "aug_original_{n}.jpg_{h}a.jpg aug_original_{n}.jpg_{h}b.jpg": True,
    "{n}_0_{i}1.jpeg {n}_0_{i}2.jpeg": True,
    "clip{n}/0001.jpg clip{n}/0002.jpg clip{n}/0003.jpg": True,
    "clip{n}_frame0001.jpg clip{n}_frame0002.jpg": True,
    "first/{n}.jpg second/{n}.jpg": True,
    "{h}1.jpg {h}2.jpg": False,
    "IMG_{i}1.jpg IMG_{i}2.jpg": False,
}


@pytest.mark.parametrize("names", NAMES)
def test_groupings_are_learned_from_names(names):
    sources = []
    for label in ("cat", "dog"):
        for i in range(12):
            copies = names.format(n=f"{label}{i}", i=i, h=f"{i * 7919 + 999999:x}").split()
            sources.append([f"{label}/{name.replace('~', ' ')}" for name in copies])
    pairs = [(copies[0], copies[1 + i % (len(copies) - 1)]) for i, copies in enumerate(sources)]
    found = grouping_of_copies(pairs, [name for copies in sources for name in copies], 2)
    assert (found is not None and found[1] == 24) == NAMES[names]
    assert found is None or NAMES[names]


def test_a_group_for_everything_is_not_proposed():
    ids = [f"a/shoot_{i}.png" for i in range(40)]
    others = [f"b/shoot{group}_{i}.png" for group in range(9) for i in range(2)]
    for names in (ids, ids + others):
        assert grouping_of_copies([(ids[0], ids[1])], names, 2) is None
    assert grouping_of_copies([(others[0], others[1])], ids[:3] + others, 2)[1] == 10


def page(seed):
    """Lines of text on white paper."""
    rng, paper = np.random.default_rng(seed), np.full((140, 100), 255, np.uint8)
    for line in range(rng.integers(14, 22)):
        words = rng.random((4, rng.integers(20, 80))) < 0.4
        paper[10 + 6 * line : 14 + 6 * line, 10 : 10 + words.shape[1]] -= 200 * words.astype(np.uint8)
    return Image.fromarray(paper)


def line(seed):
    image = np.full((64, 64), 255, np.uint8)
    image[:, 20 + seed % 24] = 0
    return Image.fromarray(image)


load_digits = cache(read_digits)
SIMILAR = {
    "black": lambda seed: Image.new("L", (64, 64), seed % 2),
    "a gradient": lambda seed: Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) + seed % 9, (64, 1))),
    "pages": page,
    "lines": line,
    "digits": lambda seed: Image.fromarray((load_digits().images[seed] * 15.9).astype(np.uint8)).resize((28, 28), 3),
    "noise": lambda seed: Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 40), dtype=np.uint8)),
}


@pytest.mark.parametrize("kind", SIMILAR)
def test_similar_images_are_not_copies(kind):
    images = looks([SIMILAR[kind](seed) for seed in range(240)])
    assert len(near_copies(images[::4], np.delete(images, np.s_[::4], axis=0))[0]) <= 1


def test_looks_of_all_sizes():
    for channels, height, width in ((3, 1, 300), (1, SIDE - 1, SIDE), (1, SIDE, SIDE), (3, 17, 300), (3, 257, 256)):
        pixels = np.random.default_rng(height).integers(0, 256, (channels, height, width), dtype=np.uint8)
        found = look_of(pixels)
        assert found.shape == (SIDE**2,)
        assert np.abs(found).max() == (127 if min(height, width) >= SIDE else 0)


def test_an_index_without_looks_is_made_anew(tmp_path, scenes):
    save(tmp_path / "set", {f"{'ab'[number % 2]}/{number}.png": image for number, image in enumerate(scenes[:20])})
    before = load(tmp_path / "set", cache_dir=tmp_path / "cache").train.store.index.looks
    assert before.any(axis=1).all()
    (table,) = (tmp_path / "cache").glob("*/index.npz")
    with np.load(table) as arrays:
        older = dict(arrays)
    names = [name for name in older["rows"].dtype.names if name != "look"]
    rows = np.empty(len(older["rows"]), [(name, store._ROW[name]) for name in names])
    for name in names:
        rows[name] = older["rows"][name]
    np.savez(table, **(older | {"rows": rows}))
    assert (load(tmp_path / "set", cache_dir=tmp_path / "cache").train.store.index.looks == before).all()


def test_of_large_sets_some_images_are_searched_for_and_found_once(tmp_path, monkeypatch, scenes):
    for number, image in enumerate(scenes[:40]):
        name = f"{'ab'[number % 2]}/{number}.png"
        save(tmp_path, {f"train/{name}": image, f"test/{name}": KINDS["mirrored"](image)})
    monkeypatch.setattr(loading, "REMEMBERED", 10)
    (warning,) = near(load(tmp_path, val_fraction=0))
    assert warning.startswith("40 of 40 images of test are near copies")
    assert "searched" not in warning
    monkeypatch.setattr(loading, "near_copies", None)  # what was found is kept
    assert near(load(tmp_path, val_fraction=0)) == [warning]
    monkeypatch.setattr(loading, "near_copies", near_copies)
    monkeypatch.setattr(loading, "MOST_PAIRS", 400)
    (warning,) = near(load(tmp_path, val_fraction=0))
    assert warning.startswith("10 of 40")
    assert "Only 10 were searched for." in warning
