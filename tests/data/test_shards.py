"""Shards: packed ones give the set that was packed; of those from elsewhere, what is broken is reported."""

import io
import json
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
from .support import counts, encoded, noise, write_tar

AUGMENT = Augment(crop="random_resized", flip=0.5, erasing=0.5)


@pytest.fixture
def pets(make_folder):
    return make_folder({"cat": 30, "dog é.x": 20}, size=(14, 11))


def load(spec, **options):
    return support.load(spec, **{"augment": AUGMENT, **options})


def png(seed):
    return encoded(noise(seed, (9, 12)))


def samples(first, count, classes=2):
    numbers = range(first, first + count)
    files = [{f"{i:04d}.png": png(i), f"{i:04d}.cls": str(i % classes).encode()} for i in numbers]
    return [member for pair in files for member in pair.items()]


def same_batches(a, b):
    pairs = zip(*(p.train_batches(seed=3, epoch=1, batch_size=8) for p in (a, b)), strict=True)
    tensors = ("inputs", "targets", "index")
    return all(torch.equal(getattr(m, name), getattr(n, name)) for m, n in pairs for name in tensors)


@pytest.mark.parametrize("split", [False, True])
def test_packed_shards_are_the_folder(make_folder, pets, tmp_path, split):
    if split:
        make_folder({"train/cat": 12, "train/dog": 12}, under="halves")
        pets = make_folder({"val/cat": 4, "val/dog": 4}, under="halves", seed=9000)
    pack(pets, tmp_path / "out", shard_mb=0.02)
    folder, shards = load(pets), load(tmp_path / "out")
    assert shards.classes == folder.classes
    assert {n: s.ids for n, s in shards.splits.items()} == {n: s.ids for n, s in folder.splits.items()}
    assert shards.summary() == folder.summary() | {"spec": str(tmp_path / "out")}
    assert same_batches(shards, folder)
    assert load(f"wds:{tmp_path / 'out'}").summary()["fingerprint"] == folder.summary()["fingerprint"]


def test_packed_shards_are_not_looked_through(pets, tmp_path, monkeypatch):
    pack(pets, tmp_path / "out", shard_mb=0.02)
    monkeypatch.setattr(wds, "scan", None)
    monkeypatch.setattr("vitmods.data.dataset.open_store", None)
    streamed = load(f"{tmp_path / 'out'}?stream=1")
    assert streamed.summary() == load(pets).summary() | {"spec": f"{tmp_path / 'out'}?stream=1"}


def damage(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_an_image_that_is_not_what_was_packed(pets, tmp_path, packed_images):
    out = tmp_path / "out"
    pack(pets, out, shard_mb=0.02)
    name, _, offset, size = packed_images(out, "train-000001.tar")[2]
    damage(out / "train-000001.tar", offset + size // 2)
    with pytest.raises(UserError, match=r"1 image cannot be used:\n") as caught:
        load(out)
    assert f"{name}: damaged in the shard train-000001.tar at byte {offset:,}: the checksum differs" in str(
        caught.value
    )
    assert load(out, unreadable="skip").summary()["left_out"] == 1
    streamed = load(f"wds:{out}?stream=1")
    with pytest.raises(UserError, match=r"cannot be read any more: damaged in the shard train-000001\.tar"):
        list(streamed.train_batches(seed=0, epoch=0, batch_size=40)) + list(streamed.eval_batches("test", 9))
    checked = data.check(out)
    assert not checked.fit
    assert any("train-000001.tar is not what was packed" in problem for problem in checked.summary["problems"])


def test_check_finds_a_label_that_is_not_what_was_packed(pets, tmp_path, packed_images):
    pack(pets, tmp_path / "out")
    assert data.check(tmp_path / "out").fit
    _, _, offset, size = packed_images(tmp_path / "out", "train-000000.tar")[0]
    damage(tmp_path / "out" / "train-000000.tar", offset + -(-size // 512) * 512 + 512)
    assert data.check(tmp_path / "out").summary["problems"] == [
        "The shard train-000000.tar is not what was packed: its checksum differs. Copy it again, or write it again "
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
def test_incomplete_shards(pets, tmp_path, name, content, message):
    pack(pets, tmp_path / "out", shard_mb=0.02)
    path = tmp_path / "out" / name
    if content is None:
        path.unlink()
    elif isinstance(content, int):
        damage(path, content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=message):
        open_source(tmp_path / "out")


def test_left_out_images_are_reported(pets, tmp_path):
    (pets / "cat" / "bad.png").write_bytes(b"")
    pack(pets, tmp_path / "out", unreadable="skip")
    assert open_source(tmp_path / "out").warnings == ["1 images that cannot be used were left out when it was packed."]


def test_shards_from_elsewhere(tmp_path):
    root = tmp_path / "birds"
    write_tar(root / "birds-train-0000.tar", samples(0, 10))
    json_labels = [
        ("./a/1.b/x.JPG", png(100)),
        ("./a/1.b/x.json", b'{"label": 1, "width": 3}'),
        ("./a/1.b/x.txt", b"a bird"),
        ("./._x.jpg", b"what macOS adds"),
    ]
    write_tar(root / "birds-train-0001.tar", json_labels)
    write_tar(root / "birds-validation-0.tar", samples(50, 4))
    source = open_source(f"wds:{root}")
    assert source.classes == ("0", "1")
    assert counts(source) == {"train": 11, "val": 4}
    train = source.splits["train"]
    assert train.ids[1] == "birds-train-0000.tar: 0001.png"
    assert train.ids[10] == "birds-train-0001.tar: a/1.b/x.JPG"
    assert train.labels.tolist() == [0, 1] * 5 + [1]
    assert train.fetch(int(train.keys[10])) == png(100)
    assert train.fetch(int(train.keys[3])) == png(3)
    assert not source.broken
    (root / "classes.txt").write_text("finch\nowl\n")
    assert open_source(f"wds:{root}").classes == ("finch", "owl")
    (root / "classes.txt").unlink()
    (root / "classes.json").write_text('{"0": "wren", "1": "kite"}')
    assert open_source(f"wds:{root}").classes == ("wren", "kite")


def test_patterns(tmp_path):
    for number in range(3):
        write_tar(tmp_path / "set" / f"part-{number:02d}.tar", samples(20 * number, 20))
    source = open_source(f"wds:{tmp_path}/set/part-{{00..01}}.tar")
    assert counts(source) == {"train": 40}
    assert wds.expand("{0..1}/x-{08..10}") == ["0/x-08", "0/x-09", "0/x-10", "1/x-08", "1/x-09", "1/x-10"]
    with pytest.raises(UserError, match=r"The shard .*part-03\.tar \(and 1 more\) does not exist"):
        open_source(f"wds:{tmp_path}/set/part-{{02..04}}.tar")


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
@pytest.mark.parametrize("stream", [0, 1])
def test_broken_members(tmp_path, members, member, reason, stream):
    write_tar(tmp_path / "set" / "part-0.tar", members)
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
    members = [("0.png", png(0)), ("0.cls", b"owl"), ("1.png", png(1)), ("1.json", b'{"label": "finch"}')]
    write_tar(tmp_path / "set" / "part-0.tar", members)
    (tmp_path / "set" / "classes.txt").write_text("finch\nowl\n")
    source = open_source(f"wds:{tmp_path / 'set'}")
    assert source.splits["train"].labels.tolist() == [1, 0]
    write_tar(tmp_path / "set" / "part-0.tar", samples(0, 20, classes=3))
    (tmp_path / "set" / "classes.txt").write_text("a\nb\n")
    assert len(open_source(f"wds:{tmp_path / 'set'}").broken) == 6
    (tmp_path / "set" / "classes.txt").write_text("a\na\n")
    with pytest.raises(UserError, match="has a class twice"):
        open_source(f"wds:{tmp_path / 'set'}")
    (tmp_path / "set" / "classes.json").write_text('{"a": 0}')
    with pytest.raises(UserError, match="does not list the classes"):
        open_source(f"wds:{tmp_path / 'set'}")


def test_a_folder_may_have_a_question_mark(pets, tmp_path):
    pets.rename(tmp_path / "which?stream=1")
    assert open_source(tmp_path / "which?stream=1").streaming.asked is None


def test_shards_from_elsewhere_are_packed_anew(tmp_path):
    write_tar(tmp_path / "set" / "part-0.tar", [*samples(0, 20), ("no.png", png(20))])
    with pytest.raises(UserError, match=r"part-0\.tar: no\.png: its label is missing"):
        pack(f"wds:{tmp_path / 'set'}", tmp_path / "out")
    packed = pack(f"wds:{tmp_path / 'set'}", tmp_path / "out", unreadable="skip")
    assert [item["path"] for item in packed.manifest["unreadable"]] == ["part-0.tar: no.png"]
    before, after = (open_source(path).splits["train"] for path in (f"wds:{tmp_path / 'set'}", tmp_path / "out"))
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
