"""Sources of images with masks: what is read of them, and what is said of those that cannot be used."""

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.recipes import Augment
from vitmods.tasks import Segmentation
from vitmods.tasks.segmentation.masks import IGNORE
from vitmods.util.errors import UserError

from ...data.support import counts, noise, write_files

NAMES = ("sky", "tree", "road")
COLORS = {"sky": (70, 130, 180), "tree": (107, 142, 35), "road": (128, 64, 128), "void": (0, 0, 0)}


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def labels(seed, size=(12, 16)):
    numbers = np.random.default_rng(seed).integers(0, 3, size)
    numbers.flat[:3] = 0, 1, 2
    return numbers


def colored(numbers, ignored=()):
    numbers = numbers.copy()
    numbers.flat[list(ignored)] = 3
    return np.array(list(COLORS.values()))[numbers]


def write_set(root, splits, *, colors=False, form="{kind}/{split}", mask=labels):
    """root/images/SPLIT and root/masks/SPLIT, or in another form, of so many images a split."""
    for split, count in splits.items():
        for i in range(count):
            save(root / form.format(kind="images", split=split) / f"{i}.jpg", noise(i + 50 * len(split), (12, 16)))
            save(root / form.format(kind="masks", split=split) / f"{i}.png", colored(mask(i)) if colors else mask(i))
    if colors:
        rows = "".join(f"{name},{r},{g},{b}\n" for name, (r, g, b) in COLORS.items())
        (root / "palette.csv").write_text(f"name,r,g,b\n{rows}")
    else:
        (root / "classes.txt").write_text("\n".join(NAMES))
    return root


def load(spec, **options):
    return Segmentation().load_data(spec, img_size=8, augment=Augment(), **options)


def first_mask(source):
    return source.splits["train"].annotations[0].read()


@pytest.mark.parametrize("form", ["{kind}/{split}", "{split}/{kind}"])
def test_a_folder_with_splits(tmp_path, form):
    source = open_source(f"masks:{write_set(tmp_path, {'train': 4, 'val': 2, 'test': 3}, form=form)}")
    assert (source.classes, source.broken) == (NAMES, [])
    assert counts(source) == {"train": 4, "val": 2, "test": 3}
    assert source.splits["train"].label_sets == ((0, 1, 2),) * 4
    assert (first_mask(source) == labels(0)).all()
    dataset = load(f"masks:{tmp_path}")
    batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=4))
    assert batch.inputs.shape == (4, 3, 8, 8)
    assert batch.targets[0].shape == (4, 8, 8)
    assert dataset.summary()["splits"]["train"]["per_class"] == dict.fromkeys(NAMES, 4)


def test_a_folder_without_splits_is_split(tmp_path):
    write_set(tmp_path, {"": 30})
    assert counts(load(f"masks:{tmp_path}")) == {"train": 21, "val": 3, "test": 6}


def test_colors_palettes_and_what_is_ignored(tmp_path):
    root = write_set(tmp_path, {"train": 2, "val": 1}, colors=True)
    with pytest.raises(UserError, match=r"No mask shows void \(0, 0, 0\); masks hold 70, 130, 180; 107"):
        load(f"masks:{root}")
    save(root / "masks/train/0.png", colored(labels(0), ignored=[5, 6]))
    with_void, source = (open_source(f"masks:{root}{options}") for options in ("", "?ignore=void"))
    assert (with_void.classes, source.classes) == ((*NAMES, "void"), NAMES)
    expected = labels(0)
    expected.flat[[5, 6]] = IGNORE
    assert (first_mask(source) == expected).all()
    assert source.splits["train"].annotations[0].stamp != with_void.splits["train"].annotations[0].stamp
    save(root / "masks/train/0.png", np.full((12, 16, 3), 9))
    with pytest.raises(UserError, match=r"its mask holds the color 9, 9, 9, which palette.csv does not know"):
        load(f"masks:{root}")
    numbers = write_set(tmp_path / "numbers", {"train": 2, "val": 1})
    image = Image.fromarray(labels(0).astype(np.uint8), mode="P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.save(numbers / "masks/train/0.png")
    assert (first_mask(open_source(f"masks:{numbers}")) == labels(0)).all()


@pytest.mark.parametrize(
    ("options", "lines", "classes", "values"),
    [  # masks of 0 and 255, the most common form of two classes
        ("", "background\ncell, 255\n", ("background", "cell"), [0, 1]),
        ("", "cell,255\nbackground,0\n", ("cell", "background"), [1, 0]),
        ("?ignore=cell", "background\nroad\ncell,255\n", ("background", "road"), [0, IGNORE]),
        ("?ignore=1", None, ("sky", "road"), [0, IGNORE, 1]),
        ("?ignore=tree", None, ("sky", "road"), [0, IGNORE, 1]),
    ],
)
def test_a_class_may_name_its_value_or_be_ignored(tmp_path, options, lines, classes, values):
    def binary(seed):
        return (labels(seed) == 1) * 255

    write_set(tmp_path, {"train": 4, "val": 2}, mask=binary if lines else labels)
    (tmp_path / "classes.txt").write_text(lines or "\n".join(NAMES))
    source = open_source(f"masks:{tmp_path}{options}")
    assert source.classes == classes
    assert (first_mask(source) == np.array(values)[(labels(0) == 1).astype(int) if lines else labels(0)]).all()


def test_a_listed_class_that_no_mask_shows_is_refused_with_a_remedy(tmp_path):
    """tests/data/test_faults.py has the reason."""
    write_set(tmp_path, {"train": 4, "val": 2}, mask=lambda seed: (labels(seed) == 1) * 255)
    (tmp_path / "classes.txt").write_text("background\ncell\n")
    with pytest.raises(UserError, match="cell,255"):
        load(f"masks:{tmp_path}")
    shown = "No mask shows cell (1); masks hold 0, 255 (ignored)."
    assert f"Problem: {shown}" in data.check(f"masks:{tmp_path}").text
    assert shown in load(f"masks:{tmp_path}?allow=missing").summary()["warnings"]


def test_what_cannot_be_used_is_listed_before_training_or_left_out(tmp_path):
    """tests/data/test_faults.py has the reason of each."""
    root = write_set(tmp_path, {"train": 10, "val": 2})
    save(root / "masks/train/0.png", labels(0, (11, 16)))
    (root / "masks/train/1.png").write_bytes(b"no image")
    (root / "images/train/2.jpg").unlink()
    (root / "masks/train/4.png").unlink()
    save(root / "masks/train/5.png", np.full((12, 16), IGNORE))
    save(root / "images/train/3.png", np.zeros((12, 16, 3)))
    with pytest.raises(UserError) as error:
        load(f"masks:{root}")
    for line in (
        "7 images cannot be used", "train/1.jpg: its mask cannot be read: not an image",
        "train/2.png: lacks an image in ", "train/3.jpg: other images have that name",
        "train/4.jpg: lacks a mask in ", "train/5.jpg: no pixel of its mask has a class", "--unreadable skip",
    ):  # fmt: skip
        assert line in str(error.value)
    dataset = load(f"masks:{root}", unreadable="skip")
    assert dataset.splits["train"].ids == tuple(f"train/{i}.jpg" for i in range(6, 10))
    assert dataset.summary()["left_out"] == 7
    for path in root.glob("masks/*/*.png"):
        Image.fromarray(np.zeros((12, 16), np.uint8)).save(path, "JPEG")
    with pytest.raises(UserError, match="its mask is a JPEG file") as error:
        load(f"masks:{root}")
    assert "training images" not in str(error.value)
    assert "evaluate on" not in str(error.value)


def test_the_fingerprint_is_of_masks_too_but_not_of_paths(tmp_path):
    spec = [f"masks:{write_set(tmp_path / name, {'train': 4, 'val': 1})}" for name in "ab"]
    first, second = (load(text).summary()["fingerprint"] for text in spec)
    assert first == second
    changed = labels(0)
    changed[5, 5] = (changed[5, 5] + 1) % 3
    save(tmp_path / "b/masks/train/0.png", changed)
    assert load(spec[1]).summary()["fingerprint"] != first


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, "/nowhere", "does not exist"),
        ({}, "", r"neither classes.txt nor palette.csv"),
        ({"classes.txt": "sky\ntree\nsky\n"}, "", "names sky twice"),
        ({"classes.txt": "sky\n"}, "", "names 1 classes"),
        ({"classes.txt": "sky\ntree\n"}, "", r"The folder .*images does not exist"),
        ({"classes.txt": "sky\ntree\n"}, "?ignore=tres", 'Unknown class "tres" to ignore'),
        ({"classes.txt": "sky\ntree\n", "images/a.txt": "", "masks/a.txt": ""}, "", "lack images"),
        ({"palette.csv": "name,r,g,b\nsky,1,2,300\n"}, "", "sky 1, 2, 300 is not a name with a color"),
        ({"palette.csv": "name,r,g,b\nsky,1,2,3\nroad,1,2,3\n"}, "", "gives the color 1, 2, 3 to two classes"),
    ],
)
def test_folders_that_are_none(tmp_path, files, options, message):
    with pytest.raises(UserError, match=message):
        open_source(f"masks:{write_files(tmp_path, files)}{options}")


def test_looks_at_many_masks_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("vitmods.tasks.segmentation.masks._REMEMBERED", 3)
    root = write_set(tmp_path / "set", {"train": 4})
    save(root / "masks/train/1.png", np.full((12, 16), 7))
    first = open_source(f"masks:{root}")
    monkeypatch.setattr("vitmods.tasks.segmentation.masks._look", None)
    again = open_source(f"masks:{root}")
    assert again.broken == first.broken
    assert again.splits["train"].annotations == first.splits["train"].annotations


def spread(seed, unit, first, nothing):
    """Masks whose three classes are `unit` apart, with a row of what no class is."""
    values = labels(seed) * unit + first
    values[0] = nothing
    values.flat[20:23] = first, unit + first, 2 * unit + first
    return values


def test_ade20k(tmp_path):
    root = write_set(tmp_path, {"training": 3, "validation": 2}, mask=lambda seed: spread(seed, 74, 1, 0))
    (root / "masks").rename(root / "annotations")
    source = open_source(f"ade20k:{root}")
    assert (len(source.classes), source.splits["train"].label_sets[0]) == (150, (0, 74, 148))
    assert (first_mask(source)[0] == IGNORE).all()
    assert set(np.unique(first_mask(source))) == {0, 74, 148, IGNORE}
    assert counts(source) == {"train": 3, "val": 2}
    assert any("as published has 20,210" in text for text in source.warnings)
    rows = "".join(f"{i}\t0.1\t1\t1\tthing {i}, stuff\n" for i in range(1, 151))
    (root / "objectInfo150.txt").write_text(f"Idx\tRatio\tTrain\tVal\tName\n{rows}")
    assert open_source(f"ade20k:{root}").classes[149] == "thing 150"
    with pytest.raises(UserError, match=r"ADE20K, 150 classes .* was not found"):
        open_source(f"ade20k:{root / 'images'}")


def test_camvid(tmp_path):
    splits = {"train": 1, "val": 1, "test": 1}
    root = write_set(tmp_path, splits, mask=lambda seed: spread(seed, 5, 0, 11), form="{split}{kind}")
    for split in splits:
        (root / f"{split}images").rename(root / split)
        (root / f"{split}masks").rename(root / f"{split}annot")
        (root / split / "0.jpg").rename(root / split / "0.png")
    source = open_source(f"camvid:{root}")
    assert source.classes[10] == "bicyclist"
    assert source.splits["test"].label_sets == ((0, 5, 10),)
    assert (first_mask(source)[0] == IGNORE).all()


def test_masks_with_longer_names_and_gray_masks_of_three_channels(tmp_path):
    write_set(tmp_path, {"": 12}, mask=lambda seed: np.stack([labels(seed)] * 3, axis=2))
    for path in list((tmp_path / "masks").iterdir()):
        path.rename(path.with_name(f"{path.stem}_mask.png"))
    source = open_source(f"masks:{tmp_path}")
    assert (len(source.splits["train"]), source.broken) == (12, [])
    assert (first_mask(source) == labels(0)).all()
