"""Hugging Face sets, where the extra is installed."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.recipes import plain
from vitmods.util.errors import UserError

from .. import support
from ..support import by_sample, counts, noise

datasets = None


@pytest.fixture(autouse=True, scope="module")
def _datasets():
    """Imported by the first test, since it takes a second."""
    global datasets
    datasets = pytest.importorskip("datasets", reason="needs the hf extra (Hugging Face datasets)")


def table(n, seed=0, labels="label", images="image"):
    features = datasets.Features({images: datasets.Image(), labels: datasets.ClassLabel(names=["cat", "dog"])})
    columns = {images: [noise(100 * seed + i, (9, 9)) for i in range(n)], labels: [i % 2 for i in range(n)]}
    return datasets.Dataset.from_dict(columns, features=features)


def with_bytes(rows, number, change):
    """The same rows, one of whose images has other bytes."""
    raw = rows.cast_column("image", datasets.Image(decode=False)).to_list()
    raw[number]["image"]["bytes"] = change(raw[number]["image"]["bytes"])
    return datasets.Dataset.from_list(raw, features=rows.features)


@pytest.fixture
def saved(tmp_path):
    """saved(rows) -> the spec of rows, or splits of them, that are saved on the disk"""

    def save(rows, name="saved"):
        rows.save_to_disk(tmp_path / name)
        return f"hf:{tmp_path / name}"

    return save


def load(spec, **options):
    return support.load(spec, **{"img_size": 9, "augment": plain().augment, **options})


def test_a_saved_set_is_read(saved):
    train, test = table(20), table(6, seed=1)
    dataset = load(saved(datasets.DatasetDict(train=train, test=test, extra=test)))
    assert dataset.classes == ("cat", "dog")
    assert counts(dataset) == {"train": 18, "val": 2, "test": 6}
    assert "These splits were not used: extra." in dataset.summary()["warnings"]
    first = int(dataset.splits["train"].ids[0].split("[")[1][:-1])
    expected = np.asarray(noise(first, (9, 9))).transpose(2, 0, 1)
    np.testing.assert_array_equal(dataset.splits["train"].store.image(0), expected)
    assert dataset.splits["train"].labels[0] == first % 2


def test_one_table_is_split_and_columns_can_be_named(saved):
    rows = table(40, images="photo", labels="animal").add_column("serial", list(range(40)))
    spec = saved(rows)
    assert set(open_source(f"{spec}?image=photo&label=animal").splits) == {"train"}
    assert open_source(spec).splits["train"].labels.tolist() == [0, 1] * 20
    by_text = saved(rows.cast_column("animal", datasets.Value("string")), "text")
    assert open_source(f"{by_text}?label=animal").classes == ("0", "1")
    with pytest.raises(UserError, match=r"Which column .* is the label.* it has photo, animal, serial"):
        open_source(by_text)


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    """A folder as the hub has them: data/train-00000-of-00003.parquet and so on."""
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, rows, parts in (("train", table(60), 3), ("test", table(9, seed=1), 1)):
        for part in range(parts):
            name = f"{split}-{part:05d}-of-{parts:05d}.parquet"
            rows.shard(parts, part, contiguous=True).to_parquet(tmp_path / "set" / "data" / name)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return f"hf:{tmp_path / 'set'}"


def test_files_that_number_the_classes_differently_are_refused(parquet):
    folder = Path(parquet.removeprefix("hf:"))
    turned = table(9, seed=2).cast_column("label", datasets.ClassLabel(names=["dog", "cat"]))
    turned.to_parquet(folder / "data" / "validation-00000-of-00001.parquet")
    with pytest.raises(
        UserError, match=r"validation-.*parquet and .* number the classes of label differently: write both"
    ):
        open_source(parquet)


def epoch_of(dataset, **chosen):
    return by_sample(dataset.train_batches(**{"seed": 1, "epoch": 2, "batch_size": 9, **chosen}))


def test_a_streamed_set_has_the_images_of_the_set(parquet):
    augment = plain().with_(crop="random_resized", flip=0.5).augment
    kept = load(parquet, augment=augment)
    streamed = load(f"{parquet}?streaming=1&buffer=8", augment=augment, workers=3)
    assert {n: s.ids for n, s in streamed.splits.items()} == {n: s.ids for n, s in kept.splits.items()}
    assert counts(streamed)["train"] == 54
    assert streamed.classes == ("cat", "dog")
    for name in ("splits", "classes", "left_out", "split_origin"):
        assert streamed.summary()[name] == kept.summary()[name]
    assert epoch_of(streamed) == epoch_of(kept)
    for split in kept.splits:
        pairs = zip(kept.eval_batches(split, 4), streamed.eval_batches(split, 4), strict=True)
        assert all(np.array_equal(a.inputs, b.inputs) and np.array_equal(a.targets, b.targets) for a, b in pairs)
    assert len(streamed.samples(5)) == 5


def test_a_streamed_set_is_checked_resumed_and_dealt_out(parquet):
    streamed = load(f"{parquet}?streaming=1&buffer=8")
    arguments = {"seed": 0, "epoch": 1, "batch_size": 9}
    full = [batch.index.tolist() for batch in streamed.train_batches(**arguments)]
    assert sorted(chain(*full)) == list(range(54))
    assert [batch.index.tolist() for batch in streamed.train_batches(**arguments, start=2)] == full[2:]
    parts = [epoch_of(streamed.for_process(rank, 2), **arguments) for rank in range(2)]
    assert parts[0].keys() | parts[1].keys() == set(range(54))
    assert not parts[0].keys() & parts[1].keys()
    checked = data.check(f"{parquet}?streaming=1")
    assert checked.fit
    assert checked.summary["native"]["most_common_count"] == 69


def test_a_saved_set_is_streamed(saved):
    spec = saved(table(30))
    assert epoch_of(load(f"{spec}?streaming=1"), batch_size=24) == epoch_of(load(spec), batch_size=24)
    words = table(20).cast_column("label", datasets.Value("string"))
    words = words.map(lambda row: {"label": {"0": "wolf", "1": "fox"}[row["label"]]})
    streamed, kept = (open_source(f"{saved(words, 'words')}{query}") for query in ("?streaming=1", ""))
    assert streamed.classes == kept.classes == ("fox", "wolf")
    assert streamed.splits["train"].labels.tolist() == kept.splits["train"].labels.tolist()


def test_rows_without_a_label_or_an_image_are_found(saved, tmp_path):
    rows = table(20)
    hidden = rows.map(lambda _: {"label": -1}, features=rows.features)
    source = open_source(saved(datasets.DatasetDict(train=rows, test=hidden), "hidden") + "?streaming=1")
    assert set(source.splits) == {"train"}
    assert "The labels of test are not public; it was not used." in source.warnings
    none = hidden.map(lambda _: {"label": None}, features=rows.features)
    for name, others in (("partly", hidden), ("none", none)):
        spec = saved(datasets.concatenate_datasets([rows, others]), name)
        with pytest.raises(UserError, match=r"20 images of train in .* such as train\[20\] with the label -1"):
            open_source(f"{spec}?streaming=1")
    with pytest.raises(UserError, match=r"train\[0\] of .* cannot be read: not an image"):
        open_source(saved(with_bytes(rows, 0, lambda _: b"no image"), "broken") + "?streaming=1")
    with pytest.raises(UserError, match=r"1 image cannot be used:\n  train\[3\]: "):
        load(saved(with_bytes(rows, 3, lambda raw: raw[:40]), "cut"))
    with pytest.raises(UserError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nothing'}")


@pytest.mark.parametrize("kind", ["binary", "struct", "array"])
def test_images_that_are_not_typed_as_images(saved, kind):
    pixels = [np.asarray(noise(i, (9, 9))) for i in range(20)]
    raw = [support.encoded(noise(i, (9, 9))) for i in range(20)]
    values, feature = {
        "binary": (raw, datasets.Value("binary")),
        "struct": ([{"bytes": b, "path": None} for b in raw], None),
        "array": (pixels, datasets.Array3D((9, 9, 3), "uint8")),
    }[kind]
    rows = datasets.Dataset.from_dict({"image": values, "label": ["cat", "dog"] * 10})
    rows = rows if feature is None else rows.cast_column("image", feature)
    for query in ("", "?streaming=1"):
        dataset = load(saved(rows, f"{kind}{len(query)}") + query, val_fraction=0.2)
        number = int(dataset.splits["train"].ids[0].split("[")[1][:-1])
        np.testing.assert_array_equal(dataset.splits["train"].store.image(0), pixels[number].transpose(2, 0, 1))
        assert dataset.classes == ("cat", "dog")


def test_lists_of_classes_are_labels(saved):
    sets = [[0], [0, 1], []] * 10
    for feature, classes in (
        (datasets.ClassLabel(names=["cat", "dog"]), ("cat", "dog")),
        (datasets.Value("int64"), ("0", "1")),
    ):
        rows = table(30).remove_columns("label").add_column("label", [sets[i] for i in range(30)])
        rows = rows.cast_column("label", datasets.Sequence(feature))
        source = open_source(saved(rows, classes[0]))
        assert (source.target, source.classes) == ("labels", classes)
        assert source.splits["train"].label_sets[:3] == ((0,), (0, 1), ())
        assert load(saved(rows, classes[0] + "2"), target="labels").num_classes == 2


@pytest.mark.parametrize(("column", "value", "words"), [
    ("label", 0.5, r'The column "label" of .* has the type .*float64.*cast_column\("label", datasets.ClassLabel'),
    ("image", "a.png", r'The column "image" of .* has the type .*string.*cast it with cast_column\("image"'),
])  # fmt: skip
def test_types_that_cannot_be_used_are_named(saved, column, value, words):
    rows = table(4).remove_columns(column).add_column(column, [value] * 4)
    with pytest.raises(UserError, match=words):
        open_source(saved(rows))
