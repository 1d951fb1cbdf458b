"""load: everything wrong is reported at once and before training; what is left out is counted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitmods import data
from vitmods.recipes import default
from vitmods.util.errors import UserError

from .support import counts, load, write_files


def said_of(spec, **options):
    """Warnings, a line each."""
    return "\n".join(load(spec, **options).summary()["warnings"])


def test_unreadable_images_stop_it_or_are_left_out_and_named(make_folder, tmp_path):
    root = make_folder({"cat": 20, "dog": 20})
    cut = (root / "dog" / "000.png").read_bytes()[:150]
    write_files(root, {"cat/empty.jpg": b"", "cat/text.jpg": "hello", "dog/cut <b>.png": cut})
    with pytest.raises(UserError) as caught:
        load(root)
    for words in ("3 images cannot be used", "cat/empty.jpg: the file is empty (0 bytes)", "dog/cut <b>.png: ",
                  "cat/text.jpg: not an image in a known format", 'unreadable="skip"'):  # fmt: skip
        assert words in str(caught.value)
    for cache_dir in (None, tmp_path / "cache", tmp_path / "cache"):
        dataset = load(root, unreadable="skip", cache_dir=cache_dir)
        summary = dataset.summary()
        assert summary["left_out"] == 3
        assert {item["path"] for item in summary["unreadable"]} == {"cat/empty.jpg", "cat/text.jpg", "dog/cut <b>.png"}
        assert any("3 images that cannot be used were left out" in text for text in summary["warnings"])
        assert {name: split["count"] for name, split in summary["splits"].items()} == counts(dataset)
        assert sum(counts(dataset).values()) == 40
        assert "cat/empty.jpg" not in [i for split in dataset.splits.values() for i in split.ids]


def test_a_reason_of_many_images_is_said_once_and_the_summary_has_all(make_folder):
    root = make_folder({"cat": 9, "dog": 9})
    for i in range(30):
        (root / "cat" / f"bad{i}.jpg").write_bytes(b"")
        (root / "dog" / f"lost{i}.jpg").symlink_to(f"lost{i}.jpg" if i < 3 else f"nowhere{i}")
    with pytest.raises(UserError) as error:
        load(root)
    assert "60 images cannot be used:\n  30 of them, such as cat/bad" in str(error.value)
    assert "\n  dog/lost1.jpg: Too many levels of symbolic links\n" in str(error.value)
    assert "\n  27 of them, such as dog/lost10.jpg: No such file or directory" in str(error.value)
    assert len(load(root, unreadable="skip").summary()["unreadable"]) == 60


def test_a_class_with_one_image_is_trained_on_with_a_warning(make_folder):
    root = make_folder({"cat": 20, "dog": 20, "fox": 1})
    assert load(root).summary()["splits"]["train"]["per_class"]["fox"] == 1
    assert "Classes with one training image: fox." in said_of(root)
    assert "Classes without an image in test: fox." in said_of(root)
    rare = said_of(make_folder({f"rare{number:02d}": 1 for number in range(23)}))
    assert "Classes with one training image: fox, rare00, " in rare
    assert ", rare18 and 4 more." in rare


def test_the_summary_is_json_and_complete(make_folder):
    root = make_folder({"cat <&>": 20, "dog": 10}, size=(12, 16))
    summary = load(root, split_seed=4).summary()
    assert json.loads(json.dumps(summary)) == summary
    expected = {"name": "pets", "spec": str(root), "classes": ["cat <&>", "dog"], "split_origin": "made, seed 4"}
    assert expected.items() <= summary.items()
    assert summary["splits"]["train"] == {"count": 21, "per_class": {"cat <&>": 14, "dog": 7}}
    assert {"most_common": [12, 16], "most_common_count": 30}.items() <= summary["native"].items()


def test_the_fingerprint_is_of_labels_and_content_not_of_places(make_folder, tmp_path):
    base = load(make_folder({"a": 9, "b": 9}, under="one")).summary()["fingerprint"]
    moved = make_folder({"a": 9, "b": 9}, under="two")
    for options in ({}, {"cache_dir": tmp_path / "cache"}, {"cache_dir": tmp_path / "cache"}, {"img_size": 6}):
        assert load(moved, **options).summary()["fingerprint"] == base
    assert load(moved, split_seed=1).summary()["fingerprint"] != base
    Image.new("RGB", (12, 12)).save(moved / "a" / "000.png")
    assert load(moved).summary()["fingerprint"] != base

    def of_table(last):
        rows = [f"{name}/{i:03d}.png,{name},{'test' if i < 2 else 'train'}" for name in "ab" for i in range(8)]
        write_files(moved, {"labels.csv": "\n".join(["file,label,split", *rows, f"a/008.png,{last},train"])})
        return load(moved / "labels.csv", val_fraction=0).summary()["fingerprint"]

    assert of_table("a") != of_table("b")


def test_images_in_two_splits_stop_unless_that_is_allowed(make_folder):
    root = make_folder({"train/a": 9, "train/b": 9})
    make_folder({"test/a": 4, "test/b": 4})
    with pytest.raises(UserError) as caught:
        load(root)
    text = str(caught.value)
    assert "8 images of test are also in train, byte for byte (test/a/000.png = train/a/000.png, " in text
    assert "and 5 more)" in text
    assert f'write "{root}?allow=overlap" to use them as they are.' in text
    assert said_of(f"{root}?allow=overlap").startswith("8 images of test are also in train, byte for byte")
    assert "also in train" not in said_of(make_folder({"a": 9, "b": 9}, under="other"))
    assert [p for p in data.check(root).summary["problems"] if "8 images of test are also in train" in p]


def test_images_of_the_same_pixels_in_other_files_are_copies(make_folder):
    """A PNG with a text, or another compression, has other bytes: of found splits it is an error, of made ones a
    warning."""
    root = make_folder({"train/a": 9, "train/b": 9, "test/a": 2, "test/b": 2})
    for name in ("a", "b"):
        Image.open(root / "train" / name / "000.png").save(root / "test" / name / "copy.png", compress_level=0)
    with pytest.raises(UserError, match="2 images of test are also in train, with the same pixels in other files"):
        load(root)
    assert "with the same pixels in other files (test/a/copy.png = train/a/000.png" in said_of(f"{root}?allow=overlap")
    made = make_folder({"a": 9, "b": 9}, under="made")
    for path in sorted(made.glob("*/*.png")):
        Image.open(path).save(path.with_name(f"{path.stem} again.png"), compress_level=0)
    (warning,) = (line for line in said_of(made).splitlines() if "images of test are also in train" in line)
    assert "group them (--group-by)" in warning


def test_what_can_be_allowed(make_folder):
    make_folder({"train/a": 9, "train/b": 9})
    root = make_folder({"test/a": 4, "test/fox": 4}, seed=5000)
    with pytest.raises(UserError, match=r"Classes in test without any training image: fox\..*allow=missing"):
        load(root)
    assert "Classes in test without any training image: fox." in said_of(f"{root}?allow=missing")
    assert load(f"{root}?allow=missing").num_classes == 3
    root = make_folder({"a?allow=b": 9, "c": 9}, under="others")
    with pytest.raises(UserError, match=r'unknown value "overlaps" of allow\. Did you mean'):
        load(f"{root}?allow=overlaps")
    both = load(f"{root}?allow=overlap,missing").summary()
    assert (both["classes"], both["spec"]) == (["a?allow=b", "c"], f"{root}?allow=overlap,missing")


def test_eval_and_val_split(make_folder):
    root = make_folder({"a": 20, "b": 20})
    three, no_val = load(root), load(root, val_fraction=0.0)
    assert (three.eval_split, three.val_split, no_val.eval_split, no_val.val_split) == ("test", "val", "test", "test")
    assert counts(load(root, limit_train=12)) == {"train": 12, "val": 4, "test": 8}
    make_folder({"train/a": 4, "train/b": 4}, under="found")
    two = load(make_folder({"valid/a": 4, "valid/b": 4}, under="found", seed=5000))
    assert (two.eval_split, two.val_split) == ("val", "val")
    assert "Without a test split results are of the val split." in two.summary()["warnings"]


def test_images_smaller_than_the_view_are_warned_of(make_folder):
    root = make_folder({"train/a": 9, "train/b": 9})
    make_folder({"train/c": 7}, size=(40, 10))
    make_folder({"val/a": 2, "val/b": 2}, seed=500)
    enlarged = "Images smaller than {} x 12, which are enlarged: {}."
    assert enlarged.format(12, "7 of 25 in train") in said_of(root, img_size=12)
    assert enlarged.format(13, "25 of 25 in train, 4 of 4 in val") in said_of(root, img_size=(13, 12))
    assert "enlarged" not in said_of(root, img_size=10)


def test_settings_out_of_range():
    for options, message in (
        ({"in_chans": 4}, "1 channel"), ({"unreadable": "ignore"}, 'must be "stop" or "skip"'),
        ({"img_size": 0}, "img_size must be positive"), ({"val_fraction": 2.0}, "val_fraction"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            load("digits", **options)


@pytest.fixture(scope="module")
def real_set(tmp_path_factory):
    """clothing10 as folders, at most 12 images a class and split."""
    packed = os.environ.get("VITMODS_DATA")
    if not packed or not (Path(packed) / "unpack.py").is_file():
        pytest.skip("VITMODS_DATA does not name the folder of real image sets")
    out = tmp_path_factory.mktemp("real")
    script = [sys.executable, str(Path(packed) / "unpack.py"), "clothing10", str(out), "--limit", "12"]
    subprocess.run(script, check=True, capture_output=True)
    return out / "clothing10"


def test_splits_and_sizes_of_a_real_set(real_set):
    checked = data.check(real_set)
    assert checked.fit
    assert len(checked.summary["classes"]) == 10
    splits = {split: part["count"] for split, part in checked.summary["splits"].items()}
    assert splits == {"train": 120, "val": 120, "test": 120}


def test_224_px_evaluation_is_what_torchvision_shows(real_set):
    dataset = data.load(real_set, img_size=160, augment=default().augment, limit_train=20)
    pixels = torch.cat([batch.inputs for batch in dataset.eval_batches("test", 16)])
    resize = v2.Resize(int(160 / 0.875), v2.InterpolationMode.BICUBIC, antialias=True)
    scale = v2.ToDtype(torch.float32, scale=True)
    transform = v2.Compose([v2.PILToTensor(), resize, v2.CenterCrop(160), scale, v2.Normalize([0.5] * 3, [0.5] * 3)])
    for i in (0, 40, len(pixels) - 1):
        path = real_set / dataset.splits["test"].ids[i]
        assert torch.equal(pixels[i], transform(Image.open(path)))
