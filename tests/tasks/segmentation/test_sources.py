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
    palette = np.array(list(COLORS.values()))
    numbers = numbers.copy()
    numbers.flat[list(ignored)] = 3
    return palette[numbers]


def write_set(root, splits, *, colors=False, below=False):
    """root/images/SPLIT and root/masks/SPLIT (below: root/SPLIT/images ...), of so many images a split."""
    for split, count in splits.items():
        for i in range(count):
            folders = [f"{split}/{kind}" if below else f"{kind}/{split}" for kind in ("images", "masks")]
            save(
                root / folders[0] / f"{i}.jpg", np.random.default_rng(i + 50 * len(split)).integers(0, 256, (12, 16, 3))
            )
            save(root / folders[1] / f"{i}.png", colored(labels(i)) if colors else labels(i))
    if colors:
        rows = "".join(f"{name},{r},{g},{b}\n" for name, (r, g, b) in COLORS.items())
        (root / "palette.csv").write_text(f"name,r,g,b\n{rows}")
    else:
        (root / "classes.txt").write_text("\n".join(NAMES))
    return root


def load(spec, **options):
    return Segmentation().load_data(spec, img_size=8, augment=Augment(), **options)


def first_mask(source, split="train"):
    return source.splits[split].annotations[0].read()


@pytest.mark.parametrize("below", [False, True])
def test_a_folder_with_splits(tmp_path, below):
    source = open_source(f"masks:{write_set(tmp_path, {'train': 4, 'val': 2, 'test': 3}, below=below)}")
    assert source.classes == NAMES
    assert {name: len(part) for name, part in source.splits.items()} == {"train": 4, "val": 2, "test": 3}
    assert source.splits["train"].label_sets == ((0, 1, 2),) * 4
    assert source.broken == []
    assert (first_mask(source) == labels(0)).all()
    dataset = load(f"masks:{tmp_path}")
    batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=4))
    assert batch.inputs.shape == (4, 3, 8, 8)
    assert batch.targets[0].shape == (4, 8, 8)
    assert dataset.summary()["splits"]["train"]["per_class"] == dict.fromkeys(NAMES, 4)


def test_a_folder_without_splits_is_split(tmp_path):
    for i in range(30):
        save(tmp_path / "images" / f"{i}.png", np.random.default_rng(i).integers(0, 256, (12, 16, 3)))
        save(tmp_path / "masks" / f"{i}.png", labels(i))
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    assert [len(load(f"masks:{tmp_path}").splits[name]) for name in ("train", "val", "test")] == [21, 3, 6]


def test_colors_and_what_is_ignored(tmp_path):
    root = write_set(tmp_path, {"train": 2, "val": 1}, colors=True)
    save(root / "masks/train/0.png", colored(labels(0), ignored=[5, 6]))
    with_void = open_source(f"masks:{root}")
    assert with_void.classes == (*NAMES, "void")
    source = open_source(f"masks:{root}?ignore=void")
    assert source.classes == NAMES
    expected = labels(0)
    expected.flat[[5, 6]] = IGNORE
    assert (first_mask(source) == expected).all()
    assert source.splits["train"].annotations[0].stamp != with_void.splits["train"].annotations[0].stamp


@pytest.mark.parametrize("ignored", ["1", "tree"])
def test_an_ignored_class_of_classes_txt_leaves_the_others_in_order(tmp_path, ignored):
    source = open_source(f"masks:{write_set(tmp_path, {'train': 2, 'val': 1})}?ignore={ignored}")
    assert source.classes == ("sky", "road")
    assert (first_mask(source) == np.array([0, IGNORE, 1])[labels(0)]).all()


def binary(root, classes, options=""):
    """Masks of 0 and 255, the most common form of two classes."""
    write_set(root, {"train": 4, "val": 2})
    for path in root.glob("masks/*/*.png"):
        save(path, (labels(int(path.stem)) == 1) * 255)
    (root / "classes.txt").write_text(classes)
    return f"masks:{root}{options}"


def test_a_class_may_name_its_value(tmp_path):
    source = open_source(binary(tmp_path, "background\ncell, 255\n"))
    assert source.classes == ("background", "cell")
    assert (first_mask(source) == (labels(0) == 1)).all()
    assert load(binary(tmp_path, "cell,255\nbackground,0\n")).summary()["splits"]["train"]["per_class"] == {
        "cell": 4,
        "background": 4,
    }
    ignored = open_source(binary(tmp_path, "background\nroad\ncell,255\n", "?ignore=cell"))
    assert ignored.classes == ("background", "road")
    assert (first_mask(ignored) == np.where(labels(0) == 1, IGNORE, 0)).all()


def test_masks_that_are_all_jpeg_give_that_cause_alone(tmp_path):
    write_set(tmp_path, {"train": 8, "val": 2})
    for path in tmp_path.glob("masks/*/*.png"):
        Image.open(path).convert("L").save(path, "JPEG")
    with pytest.raises(UserError, match="its mask is a JPEG file") as error:
        load(f"masks:{tmp_path}")
    assert "training images" not in str(error.value)
    assert "evaluate on" not in str(error.value)


def test_a_listed_class_that_no_mask_shows_is_refused_with_the_values_of_the_masks(tmp_path):
    spec = binary(tmp_path, "background\ncell\n")
    shown = "No mask shows cell (1); masks hold 0, 255 (ignored)."
    with pytest.raises(UserError) as error:
        load(spec)
    assert shown in str(error.value)
    assert "cell,255" in str(error.value)
    checked = data.check(spec)
    assert not checked.fit
    assert f"Problem: {shown}" in checked.text
    assert shown in load(f"{spec}?allow=missing").summary()["warnings"]


def test_colors_that_no_mask_shows_or_that_are_unknown_are_named(tmp_path):
    root = write_set(tmp_path, {"train": 2, "val": 1}, colors=True)
    with pytest.raises(UserError, match=r"No mask shows void \(0, 0, 0\); masks hold 70, 130, 180; 107"):
        load(f"masks:{root}")
    root = write_set(tmp_path, {"train": 3, "val": 1}, colors=True)
    save(root / "masks/train/0.png", np.full((12, 16, 3), 9))
    with pytest.raises(UserError, match=r"its mask holds the color 9, 9, 9, which palette.csv does not know"):
        load(f"masks:{root}")


def test_palette_images_have_numbers(tmp_path):
    root = write_set(tmp_path, {"train": 2, "val": 1})
    image = Image.fromarray(labels(0).astype(np.uint8), mode="P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.save(root / "masks/train/0.png")
    assert (first_mask(open_source(f"masks:{root}")) == labels(0)).all()


def test_what_cannot_be_used_is_listed_before_training_or_left_out(tmp_path):
    root = write_set(tmp_path, {"train": 12, "val": 2})
    save(root / "masks/train/0.png", labels(0, (11, 16)))
    save(root / "masks/train/1.png", np.full((12, 16), 7))
    save(root / "masks/train/2.png", colored(labels(2)))
    save(root / "masks/train/3.png", np.full((12, 16), IGNORE))
    (root / "masks/train/4.png").write_bytes(b"no image")
    (root / "masks/train/5.png").unlink()
    (root / "images/train/6.jpg").unlink()
    save(root / "images/train/7.png", np.zeros((12, 16, 3)))
    with pytest.raises(UserError) as error:
        load(f"masks:{root}")
    for line in (
        "9 images cannot be used",
        "train/0.jpg: its mask is 11 x 16, the image 12 x 16",
        "train/1.jpg: its mask holds the value 7, which classes.txt does not know",
        "train/2.jpg: its mask has colors",
        "train/3.jpg: no pixel of its mask has a class",
        "train/4.jpg: its mask cannot be read: not an image",
        "train/5.jpg: lacks a mask in ",
        "train/6.png: lacks an image in ",
        "train/7.jpg: other images have that name",
        "--unreadable skip",
    ):
        assert line in str(error.value)
    dataset = load(f"masks:{root}", unreadable="skip")
    assert dataset.splits["train"].ids == tuple(f"train/{i}.jpg" for i in sorted(map(str, (8, 9, 10, 11))))
    assert dataset.summary()["left_out"] == 9


def test_the_fingerprint_is_of_masks_too_but_not_of_paths(tmp_path):
    spec = [f"masks:{write_set(tmp_path / name, {'train': 4, 'val': 1})}" for name in "ab"]
    first, second = (load(text).summary()["fingerprint"] for text in spec)
    assert first == second
    changed = labels(0)
    changed[5, 5] = (changed[5, 5] + 1) % 3
    save(tmp_path / "b/masks/train/0.png", changed)
    assert load(spec[1]).summary()["fingerprint"] != first


def test_folders_that_are_none(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_source(f"masks:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match=r"neither classes.txt nor palette.csv"):
        open_source(f"masks:{tmp_path}")
    (tmp_path / "classes.txt").write_text("sky\ntree\nsky\n")
    with pytest.raises(UserError, match="names sky twice"):
        open_source(f"masks:{tmp_path}")
    (tmp_path / "classes.txt").write_text("sky\n")
    with pytest.raises(UserError, match="names 1 classes"):
        open_source(f"masks:{tmp_path}")
    (tmp_path / "classes.txt").write_text("sky\ntree\n")
    with pytest.raises(UserError, match=r"The folder .*images does not exist"):
        open_source(f"masks:{tmp_path}")
    with pytest.raises(UserError, match='Unknown class "tres" to ignore'):
        open_source(f"masks:{tmp_path}?ignore=tres")
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="lack images"):
        open_source(f"masks:{tmp_path}")
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "palette.csv").write_text("name,r,g,b\nsky,1,2,300\n")
    with pytest.raises(UserError, match="sky 1, 2, 300 is not a name with a color"):
        open_source(f"masks:{tmp_path}")
    (tmp_path / "palette.csv").write_text("name,r,g,b\nsky,1,2,3\nroad,1,2,3\n")
    with pytest.raises(UserError, match="gives the color 1, 2, 3 to two classes"):
        open_source(f"masks:{tmp_path}")


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


def test_ade20k(tmp_path):
    for split, count in (("training", 3), ("validation", 2)):
        for i in range(count):
            values = labels(i) * 149 // 2 + 1  # 1, 75, 150
            values[0] = 0
            values.flat[20:23] = 1, 75, 150
            save(tmp_path / f"images/{split}/ADE_{i}.jpg", np.random.default_rng(i).integers(0, 256, (12, 16, 3)))
            save(tmp_path / f"annotations/{split}/ADE_{i}.png", values)
    source = open_source(f"ade20k:{tmp_path}")
    assert len(source.classes) == 150
    assert source.splits["train"].label_sets[0] == (0, 74, 149)
    mask = first_mask(source)
    assert (mask[0] == IGNORE).all()
    assert set(np.unique(mask)) == {0, 74, 149, IGNORE}
    assert {name: len(part) for name, part in source.splits.items()} == {"train": 3, "val": 2}
    assert any("as published has 20,210" in text for text in source.warnings)
    rows = "".join(f"{i}\t0.1\t1\t1\tthing {i}, stuff\n" for i in range(1, 151))
    (tmp_path / "objectInfo150.txt").write_text(f"Idx\tRatio\tTrain\tVal\tName\n{rows}")
    assert open_source(f"ade20k:{tmp_path}").classes[149] == "thing 150"
    with pytest.raises(UserError, match=r"ADE20K, 150 classes .* was not found"):
        open_source(f"ade20k:{tmp_path / 'images'}")


def test_camvid(tmp_path):
    for split in ("train", "val", "test"):
        mask = labels(0) * 5
        mask[0] = 11
        mask.flat[20:23] = 0, 5, 10
        save(tmp_path / split / "0.png", np.random.default_rng(len(split)).integers(0, 256, (12, 16, 3)))
        save(tmp_path / f"{split}annot" / "0.png", mask)
    source = open_source(f"camvid:{tmp_path}")
    assert source.classes[10] == "bicyclist"
    assert source.splits["test"].label_sets == ((0, 5, 10),)
    assert (first_mask(source)[0] == IGNORE).all()
