"""Hugging Face sets, where the extra is installed; and what is said where it is not."""

import sys
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.recipes import plain
from vitmods.util.errors import UserError


def table(n, seed=0, labels="label", images="image"):
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 9, 9, 3), dtype=np.uint8)
    features = datasets.Features({images: datasets.Image(), labels: datasets.ClassLabel(names=["cat", "dog"])})
    columns = {images: [Image.fromarray(p) for p in pixels], labels: [i % 2 for i in range(n)]}
    return datasets.Dataset.from_dict(columns, features=features), pixels


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "vitmods\[hf\]"'):
        open_source("hf:uoft-cs/cifar10")


def test_a_saved_set_is_read(tmp_path):
    train, pixels = table(20)
    test, _ = table(6, seed=1)
    import datasets

    datasets.DatasetDict(train=train, test=test, extra=test).save_to_disk(tmp_path / "saved")
    dataset = data.load(f"hf:{tmp_path / 'saved'}", img_size=9, augment=plain().augment)
    assert dataset.classes == ("cat", "dog")
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 18, "val": 2, "test": 6}
    assert "These splits were not used: extra." in dataset.summary()["warnings"]
    first = int(dataset.splits["train"].ids[0].split("[")[1][:-1])
    np.testing.assert_array_equal(dataset.splits["train"].store.image(0), pixels[first].transpose(2, 0, 1))
    assert dataset.splits["train"].labels[0] == first % 2


def test_one_table_is_split_and_columns_can_be_named(tmp_path):
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


def test_a_broken_image_is_unreadable(tmp_path):
    rows, _ = table(20)
    import datasets

    raw = rows.cast_column("image", datasets.Image(decode=False)).to_list()
    raw[3]["image"]["bytes"] = raw[3]["image"]["bytes"][:40]
    datasets.Dataset.from_list(raw, features=rows.features).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"1 image cannot be used:\n  train\[3\]: "):
        data.load(f"hf:{tmp_path / 'saved'}", img_size=9, augment=plain().augment)


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A folder as the hub has them: data/train-00000-of-00003.parquet and so on."""
    for split, rows, parts in (("train", table(60)[0], 3), ("test", table(9, seed=1)[0], 1)):
        for part in range(parts):
            (tmp_path / "set" / "data").mkdir(parents=True, exist_ok=True)
            name = f"{split}-{part:05d}-of-{parts:05d}.parquet"
            rows.shard(parts, part, contiguous=True).to_parquet(tmp_path / "set" / "data" / name)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "set"


def by_sample(dataset, **chosen):
    batches = dataset.train_batches(**{"seed": 1, "epoch": 2, "batch_size": 9, **chosen})
    return {int(i): x.numpy().tobytes() for batch in batches for i, x in zip(batch.index, batch.inputs, strict=True)}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_streamed_set_has_the_images_of_the_set(parquet, workers):
    augment = plain().with_(crop="random_resized", flip=0.5).augment
    kept = data.load(f"hf:{parquet}", img_size=9, augment=augment)
    streamed = data.load(f"hf:{parquet}?streaming=1&buffer=8", img_size=9, augment=augment, workers=workers)
    assert {n: s.ids for n, s in streamed.splits.items()} == {n: s.ids for n, s in kept.splits.items()}
    assert len(streamed.splits["train"]) == 54
    assert streamed.classes == ("cat", "dog")
    for name in ("splits", "classes", "left_out", "split_origin"):
        assert streamed.summary()[name] == kept.summary()[name]
    assert by_sample(streamed) == by_sample(kept)
    for split in kept.splits:
        pairs = zip(kept.eval_batches(split, 4), streamed.eval_batches(split, 4), strict=True)
        assert all(np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets) for a, b in pairs)
    assert len(streamed.samples(5)) == 5


def test_a_streamed_set_is_resumed_and_dealt_out(parquet):
    streamed = data.load(f"hf:{parquet}?streaming=1&buffer=8", img_size=9, augment=plain().augment)
    arguments = {"seed": 0, "epoch": 1, "batch_size": 9}
    full = [batch.index.tolist() for batch in streamed.train_batches(**arguments)]
    assert sorted(chain(*full)) == list(range(54))
    assert [batch.index.tolist() for batch in streamed.train_batches(**arguments, start=2)] == full[2:]
    parts = [by_sample(streamed.for_process(rank, 2), **arguments) for rank in range(2)]
    assert parts[0].keys() | parts[1].keys() == set(range(54))
    assert not parts[0].keys() & parts[1].keys()


def test_checking_a_streamed_set(parquet):
    checked = data.check(f"hf:{parquet}?streaming=1")
    assert checked.fit
    assert checked.summary["native"]["most_common_count"] == 69


def test_a_saved_set_is_streamed(tmp_path):
    table(30)[0].save_to_disk(tmp_path / "saved")
    streamed = data.load(f"hf:{tmp_path / 'saved'}?streaming=1", img_size=9, augment=plain().augment)
    kept = data.load(f"hf:{tmp_path / 'saved'}", img_size=9, augment=plain().augment)
    assert by_sample(streamed, batch_size=24) == by_sample(kept, batch_size=24)


def test_what_a_streamed_set_must_have(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")

    rows = table(20)[0]
    hidden = rows.map(lambda _: {"label": -1}, features=rows.features)
    datasets.DatasetDict(train=rows, test=hidden).save_to_disk(tmp_path / "hidden")
    source = open_source(f"hf:{tmp_path / 'hidden'}?streaming=1")
    assert set(source.splits) == {"train"}
    assert "The labels of test are not public; it was not used." in source.warnings
    datasets.concatenate_datasets([rows, hidden]).save_to_disk(tmp_path / "partly")
    with pytest.raises(UserError, match=r"20 images of train in .* such as train\[20\] with the label -1"):
        open_source(f"hf:{tmp_path / 'partly'}?streaming=1")
    raw = rows.cast_column("image", datasets.Image(decode=False)).to_list()
    raw[0]["image"]["bytes"] = b"no image"
    datasets.Dataset.from_list(raw, features=rows.features).save_to_disk(tmp_path / "broken")
    with pytest.raises(UserError, match=r"train\[0\] of .* cannot be read: not an image"):
        open_source(f"hf:{tmp_path / 'broken'}?streaming=1")


def test_labels_of_a_streamed_set_may_be_words(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")

    rows = table(20)[0].cast_column("label", datasets.Value("string"))
    rows = rows.map(lambda row: {"label": {"0": "wolf", "1": "fox"}[row["label"]]})
    rows.save_to_disk(tmp_path / "words")
    streamed, kept = (open_source(f"hf:{tmp_path / 'words'}{query}") for query in ("?streaming=1", ""))
    assert streamed.classes == kept.classes == ("fox", "wolf")
    assert streamed.splits["train"].labels.tolist() == kept.splits["train"].labels.tolist()


def test_options_that_are_refused(tmp_path):
    with pytest.raises(UserError, match="streaming is 0 or 1"):
        open_source("hf:some/set?streaming=yes")
    with pytest.raises(UserError, match="buffer is only for streaming=1"):
        open_source("hf:some/set?buffer=5")
    with pytest.raises(UserError, match='unknown option "color" of hf'):
        open_source("hf:some/set?color=red")
    pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")
    with pytest.raises(UserError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nothing'}")
