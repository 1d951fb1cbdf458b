"""Shards: packed ones give the set that was packed; of those from elsewhere, what is broken is reported."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from vitmods import data
from vitmods.data.pack import pack
from vitmods.data.sources import open_source, wds
from vitmods.data.sources.wds import MANIFEST_FORMAT
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

from . import support
from .support import counts, encoded, images_of_shard, noise, write_files, write_tar


@pytest.fixture
def pets(make_folder):
    return make_folder({"cat": 30, "dog é.x": 20}, size=(14, 11))


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return tmp_path_factory.mktemp("packed") / "out"


@pytest.fixture
def out(once, pets, tmp_path):
    """A copy of the shards of pets."""
    if not once.exists():
        pack(pets, once, shard_mb=0.02)
    return shutil.copytree(once, tmp_path / "out")


def load(spec, **options):
    return support.load(spec, **{"augment": Augment(crop="random_resized", flip=0.5, erasing=0.5), **options})


def png(seed):
    return encoded(noise(seed, (9, 12)))


def samples(first, count, classes=2):
    numbers = range(first, first + count)
    files = [{f"{i:04d}.png": png(i), f"{i:04d}.cls": str(i % classes).encode()} for i in numbers]
    return [member for pair in files for member in pair.items()]


def test_packed_shards_are_the_folder_and_are_not_looked_through(make_folder, pets, out, tmp_path, monkeypatch):
    make_folder({"train/cat": 12, "train/dog": 12}, under="halves")
    halves = make_folder({"val/cat": 4, "val/dog": 4}, under="halves", seed=9000)
    pack(halves, tmp_path / "of halves", shard_mb=0.02)
    for packed, root in ((tmp_path / "of halves", halves), (out, pets)):
        folder, shards = load(root), load(packed)
        assert {n: s.ids for n, s in shards.splits.items()} == {n: s.ids for n, s in folder.splits.items()}
        assert shards.summary() == folder.summary() | {"spec": str(packed)}
        pairs = zip(*(images.train_batches(seed=3, epoch=1, batch_size=8) for images in (shards, folder)), strict=True)
        for a, b in pairs:
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("inputs", "targets", "index"))
        assert load(f"wds:{packed}").summary()["fingerprint"] == folder.summary()["fingerprint"]
    monkeypatch.setattr(wds, "scan", None)
    monkeypatch.setattr("vitmods.data.dataset.open_store", None)
    assert load(f"{out}?stream=1").summary() == folder.summary() | {"spec": f"{out}?stream=1"}


def damage(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_an_image_that_is_not_what_was_packed(out):
    assert data.check(out).fit
    name, _, offset, size = images_of_shard(out, "train-000001.tar")[2]
    damage(out / "train-000001.tar", offset + size // 2)
    with pytest.raises(UserError, match=r"1 image cannot be used:\n") as caught:
        load(out)
    where = f"{name}: damaged in the shard train-000001.tar at byte {offset:,}: the checksum differs"
    assert where in str(caught.value)
    assert load(out, unreadable="skip").summary()["left_out"] == 1
    streamed = load(f"wds:{out}?stream=1")
    with pytest.raises(UserError, match=r"cannot be read any more: damaged in the shard train-000001\.tar"):
        list(streamed.train_batches(seed=0, epoch=0, batch_size=40)) + list(streamed.eval_batches("test", 9))
    checked = data.check(out)
    assert not checked.fit
    assert any("train-000001.tar is not what was packed" in problem for problem in checked.summary["problems"])
    damage(out / "train-000001.tar", offset + size // 2)
    damage(out / "train-000001.tar", offset + -(-size // 512) * 512 + 512)  # its label
    assert data.check(out).summary["problems"] == [
        "The shard train-000001.tar is not what was packed: its checksum differs. Copy it again, or write it again "
        "with vitmods data pack."
    ]


MANIFEST = {"format": MANIFEST_FORMAT, "name": "x", "classes": ["a"], "unreadable": []}


@pytest.mark.parametrize(("name", "content", "message"), [
    ("train-000001.tar", None, r"train-000001\.tar cannot be read: No such file"),
    ("train-000001.tar", "x", r"train-000001\.tar has 1 bytes, not "),
    ("index.npz", None, r"index\.npz cannot be read: No such file"),
    ("index.npz", 300, r"index\.npz is not what was packed"),
    ("manifest.json", None, "run it again; shards from elsewhere are read as wds:"),
    *(("manifest.json", text, r"manifest\.json cannot be read") for text in ("{", "[" * 100_000)),
    ("manifest.json", {"format": "x"}, r"of the format 'x'"),
    *(("manifest.json", {**MANIFEST, **listed}, r"manifest\.json does not list")
        for listed in ({}, {"splits": 3}, {"splits": {"train": {"shards": [{"file": 3}]}}})),
])  # fmt: skip
def test_incomplete_shards(out, name, content, message):
    if content is None:
        (out / name).unlink()
    elif isinstance(content, int):
        damage(out / name, content)
    else:
        (out / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message):
        open_source(out)


def test_shards_from_elsewhere(tmp_path):
    root = tmp_path / "birds"
    write_tar(root / "birds-train-0000.tar", samples(0, 10))
    json_labels = [("./a/1.b/x.JPG", png(100)), ("./a/1.b/x.json", b'{"label": 1, "width": 3}'),
                   ("./a/1.b/x.txt", b"a bird"), ("./._x.jpg", b"what macOS adds")]  # fmt: skip
    write_tar(root / "birds-train-0001.tar", json_labels)
    write_tar(root / "birds-validation-0.tar", samples(50, 4))
    source = open_source(f"wds:{root}")
    assert (source.classes, counts(source), source.broken) == (("0", "1"), {"train": 11, "val": 4}, [])
    train = source.splits["train"]
    assert train.ids[1] == "birds-train-0000.tar: 0001.png"
    assert train.ids[10] == "birds-train-0001.tar: a/1.b/x.JPG"
    assert train.labels.tolist() == [0, 1] * 5 + [1]
    assert [train.fetch(int(train.keys[i])) for i in (3, 10)] == [png(3), png(100)]
    (root / "classes.txt").write_text("finch\nowl\n")
    assert open_source(f"wds:{root}").classes == ("finch", "owl")
    (root / "classes.txt").unlink()
    (root / "classes.json").write_text('{"0": "wren", "1": "kite"}')
    assert open_source(f"wds:{root}").classes == ("wren", "kite")
    assert counts(open_source(f"wds:{root}/birds-train-{{0000..0001}}.tar")) == {"train": 11}
    assert wds.expand("{0..1}/x-{08..10}") == ["0/x-08", "0/x-09", "0/x-10", "1/x-08", "1/x-09", "1/x-10"]
    with pytest.raises(UserError, match=r"The shard .*train-0002\.tar \(and 1 more\) does not exist"):
        open_source(f"wds:{root}/birds-train-{{0001..0003}}.tar")


def test_the_index_is_made_once(tmp_path, own_cache, monkeypatch):
    shard = write_tar(tmp_path / "set" / "a.tar", samples(0, 6))
    first = wds.index_of(shard)
    cached = next((own_cache / "shards").iterdir())
    cached.write_bytes(cached.read_bytes()[:-9])
    assert wds.index_of(shard) == first
    monkeypatch.setattr(wds, "scan", None)
    assert wds.index_of(shard) == first
    write_tar(shard, samples(0, 7))
    monkeypatch.undo()
    assert len(wds.scan(shard).rows) == 7


GOOD = samples(0, 20)
BROKEN = {
    "no label": ([*GOOD, ("9.png", png(9))], "9.png", "its label is missing: KEY.cls, or KEY.json"),
    "no image": ([*GOOD, ("9.cls", b"0")], "9", "it is a label without an image"),
    "no number": ([*GOOD, ("9.png", png(9)), ("9.cls", b"cat")], "9.png", "its label 'cat' is not a number"),
    "binary label": ([*GOOD, ("9.png", png(9)), ("9.cls", b"\xff\xfe")], "9.png", "9.cls does not hold a label"),
    "json without label": ([*GOOD, ("9.png", png(9)), ("9.json", b"[]")], "9.png", "9.json does not hold a label"),
    "negative": ([*GOOD, ("9.png", png(9)), ("9.cls", b"-1")], "9.png", "its label -1 is below 0"),
    "two images": ([*GOOD, ("9.png", png(9)), ("9.jpg", b""), ("9.cls", b"0")], "9.png", "two images share"),
    "twice": ([*GOOD, ("x.png", png(1)), *GOOD[:2]], "0000.png", "its key comes twice"),
    "no image's bytes": ([*GOOD, ("9.png", b"no image"), ("9.cls", b"0")], "9.png", "not an image in a known"),
}


@pytest.mark.parametrize(("members", "member", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_members(tmp_path, members, member, reason):
    write_tar(tmp_path / "set" / "part-0.tar", members)
    for stream in (0, 1):
        spec = f"wds:{tmp_path / 'set'}?stream={stream}"
        with pytest.raises(UserError, match=r"images? cannot be used") as caught:
            load(spec)
        assert f"part-0.tar: {member}: {reason}" in str(caught.value)
        skipped = load(spec, unreadable="skip").summary()
        assert sum(split["count"] for split in skipped["splits"].values()) == 20
        assert skipped["left_out"] >= 1
    assert not data.check(spec).fit


@pytest.mark.parametrize(("where", "message"), [
    ("within", r"part-0\.tar: 0010\.png: the tar file is cut off within it; what follows is lost"),
    ("header", r"part-0\.tar: after 0009\.cls: the header at byte \d+,\d+ is damaged; what follows is lost"),
    ("between", r"part-0\.tar: after 0009\.cls: the tar file lacks the end mark"),
])  # fmt: skip
def test_damaged_tar_files(tmp_path, where, message):
    path = write_tar(tmp_path / "set" / "part-0.tar", GOOD)
    with tarfile.open(path) as tar:
        member = tar.getmember("0010.png")
    if where == "header":
        damage(path, member.offset + 3)
    else:
        end = member.offset if where == "between" else member.offset_data + member.size // 2
        path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(UserError, match=message):
        load(f"wds:{tmp_path / 'set'}")
    assert sum(counts(load(f"wds:{tmp_path / 'set'}", unreadable="skip")).values()) == 10


def test_labels_are_numbers_or_names_of_classes(tmp_path):
    spec, names = f"wds:{tmp_path}", tmp_path / "classes.txt"
    members = {"0.png": png(0), "0.cls": b"owl", "1.png": png(1), "1.json": b'{"label": "finch"}'}
    write_tar(tmp_path / "part-0.tar", members)
    names.write_text("finch\nowl\n")
    assert open_source(spec).splits["train"].labels.tolist() == [1, 0]
    write_tar(tmp_path / "part-0.tar", samples(0, 20, classes=3))
    names.write_text("a\nb\n")
    assert len(open_source(spec).broken) == 6
    names.write_text("a\na\n")
    with pytest.raises(UserError, match="has a class twice"):
        open_source(spec)
    write_files(tmp_path, {"classes.json": '{"a": 0}'})
    with pytest.raises(UserError, match="does not list the classes"):
        open_source(spec)


def test_shards_from_elsewhere_are_packed_anew(tmp_path):
    out = tmp_path / "out"
    write_tar(tmp_path / "set" / "part-0.tar", [*samples(0, 20), ("no.png", png(20))])
    with pytest.raises(UserError, match=r"part-0\.tar: no\.png: its label is missing"):
        pack(f"wds:{tmp_path / 'set'}", out)
    packed = pack(f"wds:{tmp_path / 'set'}", out, unreadable="skip")
    assert [item["path"] for item in packed.manifest["unreadable"]] == ["part-0.tar: no.png"]
    assert open_source(out).warnings == ["1 images that cannot be used were left out when it was packed."]
    before, after = (open_source(path).splits["train"] for path in (f"wds:{tmp_path / 'set'}", out))
    assert (after.ids, after.labels.tolist()) == (before.ids, before.labels.tolist())
    pairs = zip(before.keys.tolist(), after.keys.tolist(), strict=True)
    assert all(before.fetch(a) == after.fetch(b) for a, b in pairs)


def test_webdataset_reads_what_was_packed(pets, tmp_path):
    webdataset = pytest.importorskip("webdataset", reason="compares with the package webdataset")
    pack(pets, tmp_path / "out")
    read = webdataset.WebDataset(str(tmp_path / "out" / "train-000000.tar"), shardshuffle=False).decode("rgb8")
    pairs = sorted((int(sample["cls"]), sample["png"].tobytes()) for sample in read)
    source = open_source(pets).splits["train"]
    pixels = [np.asarray(Image.open(io.BytesIO(source.fetch(int(key))))).tobytes() for key in source.keys]
    assert pairs == sorted(zip(source.labels.tolist(), pixels, strict=True))
