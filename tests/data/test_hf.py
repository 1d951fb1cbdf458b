"""Hugging Face sets, where the extra is installed; and what is said where it is not."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.errors import UserError
from vitmods.recipes import plain


def table(n: int, seed: int = 0, labels: str = "label", images: str = "image"):
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 9, 9, 3), dtype=np.uint8)
    features = datasets.Features({images: datasets.Image(), labels: datasets.ClassLabel(names=["cat", "dog"])})
    columns = {images: [Image.fromarray(p) for p in pixels], labels: [i % 2 for i in range(n)]}
    return datasets.Dataset.from_dict(columns, features=features), pixels


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "vitmods\[hf\]"'):
        open_source("hf:uoft-cs/cifar10")


def test_a_saved_set_is_read(tmp_path: Path) -> None:
    train, pixels = table(20)
    test, _ = table(6, seed=1)
    import datasets

    datasets.DatasetDict(train=train, test=test, extra=test).save_to_disk(tmp_path / "saved")
    pictures = data.load(f"hf:{tmp_path / 'saved'}", img_size=9, recipe=plain())
    assert pictures.classes == ("cat", "dog")
    assert {name: len(split) for name, split in pictures.splits.items()} == {"train": 18, "val": 2, "test": 6}
    assert "These splits were not used: extra." in pictures.summary()["warnings"]
    first = int(pictures.splits["train"].ids[0].split("[")[1][:-1])
    np.testing.assert_array_equal(pictures.splits["train"].store.picture(0), pixels[first].transpose(2, 0, 1))
    assert pictures.splits["train"].labels[0] == first % 2


def test_one_table_is_split_and_columns_can_be_named(tmp_path: Path) -> None:
    rows, _ = table(40, images="photo", labels="animal")
    rows = rows.add_column("serial", list(range(40)))
    rows.save_to_disk(tmp_path / "saved")
    source = open_source(f"hf:{tmp_path / 'saved'}?image=photo&label=animal")
    assert set(source.splits) == {"train"}
    assert open_source(f"hf:{tmp_path / 'saved'}").splits["train"].labels.tolist() == [0, 1] * 20
    by_text = rows.cast_column("animal", __import__("datasets").Value("string"))
    by_text.save_to_disk(tmp_path / "text")
    assert open_source(f"hf:{tmp_path / 'text'}?label=animal").classes == ("0", "1")
    with pytest.raises(UserError, match=r"Which column .* is the label.* it has photo, animal, serial"):
        open_source(f"hf:{tmp_path / 'text'}")


def test_a_broken_picture_is_unreadable(tmp_path: Path) -> None:
    rows, _ = table(20)
    import datasets

    raw = rows.cast_column("image", datasets.Image(decode=False)).to_list()
    raw[3]["image"]["bytes"] = raw[3]["image"]["bytes"][:40]
    datasets.Dataset.from_list(raw, features=rows.features).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"1 picture cannot be read:\n  train\[3\]: "):
        data.load(f"hf:{tmp_path / 'saved'}", img_size=9, recipe=plain())


def test_unknown_options_and_sets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown option colour"):
        open_source("hf:some/set?colour=red")
    pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")
    with pytest.raises(UserError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nothing'}")
