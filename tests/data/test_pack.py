"""pack: the same images give the same bytes, however often it is stopped; nothing that is not its own is replaced."""

import errno
import os
import signal
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from vitmods.data import pack as pack_module
from vitmods.data.pack import alone_in, pack
from vitmods.util import files
from vitmods.util.errors import UserError

from .support import images_of_shard, write_files

SHARD_MB = 0.02  # about ten small images


@pytest.fixture
def pets(make_folder):
    make_folder({"train/cat": 20, "train/dog.x": 16})
    return make_folder({"test/cat": 5, "test/dog.x": 3}, seed=7000)


@pytest.fixture(scope="module")
def whole():
    """What an unbroken pack of pets gives: filled by the first test that asks `unbroken`."""
    return {}


@pytest.fixture
def unbroken(whole, pets, tmp_path):
    if not whole:
        pack(pets, tmp_path / "whole", shard_mb=SHARD_MB)
        whole.update(content(tmp_path / "whole"))
    return whole


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_members_are_webdatasets_and_the_bytes_of_the_files(pets, tmp_path):
    packed = pack(pets, tmp_path / "out", shard_mb=SHARD_MB)
    assert packed.manifest["classes"] == ["cat", "dog.x"]
    seen = {}
    for split, facts in packed.manifest["splits"].items():
        assert facts["images"] == {"train": 36, "test": 8}[split]
        for number, shard in enumerate(facts["shards"]):
            path = tmp_path / "out" / f"{split}-{number:06d}.tar"
            assert shard["file"] == path.name
            assert shard["bytes"] == path.stat().st_size <= SHARD_MB * 1e6
            assert shard["sha256"] == sha256(path.read_bytes()).hexdigest()
            with tarfile.open(path) as tar:
                members = [(m.name, tar.extractfile(m).read()) for m in tar]
            images = images_of_shard(tmp_path / "out", path.name)
            assert len(members) == 2 * len(images)
            assert number > 2 or split == "test" or len({image[1] for image in images}) == 2, "shards mix the classes"
            for image, (name, raw), (label_name, label) in zip(images, members[::2], members[1::2], strict=True):
                image_id, number, offset, size = image
                assert (name.endswith(".png"), label_name) == (True, name.replace(".png", ".cls"))
                assert int(label) == number == packed.manifest["classes"].index(Path(image_id).parts[1])
                assert path.read_bytes()[offset : offset + size] == raw
                seen[image_id] = raw
    assert len(packed.manifest["splits"]["train"]["shards"]) > 2
    assert seen == {path.relative_to(pets).as_posix(): path.read_bytes() for path in pets.rglob("*.png")}


def test_the_same_images_elsewhere_give_the_same_bytes(pets, unbroken, tmp_path):
    moved = tmp_path / "moved" / "pets"
    moved.parent.mkdir()
    os.rename(pets, moved)
    for path in moved.rglob("*.png"):
        os.utime(path, (1, 1))
    pack(moved, tmp_path / "out", shard_mb=SHARD_MB, workers=3)
    assert content(tmp_path / "out") == unbroken


def killed_at(call, moment, run):
    """Run in a forked process that SIGKILLs itself before, in the middle of or after the call-th file is written."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    original, calls = files.write_atomically, []

    def die(file):
        if file is not None:
            file.write(b"half of a shard")
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_atomically(path, write):
        calls.append(path)
        if len(calls) < call:
            return original(path, write)
        if moment == "after":
            original(path, write)
        original(path, die) if moment == "within" else die(None)

    files.write_atomically = pack_module.write_atomically = write_atomically
    try:
        run()
    finally:
        os._exit(1)


@pytest.mark.parametrize(("call", "moment"), [(1, "before"), (1, "after"), (4, "within"), (-1, "within")])
def test_killed_and_called_again_gives_the_same_bytes(pets, unbroken, tmp_path, call, moment):
    """The first file marks the folder as unfinished, the last is the manifest."""
    out = tmp_path / "out"
    killed_at(call % (len(unbroken) + 2), moment, lambda: pack(pets, out, shard_mb=SHARD_MB))
    assert not (out / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    again = pack(pets, out, shard_mb=SHARD_MB)
    assert again.kept == len(finished)
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())
    assert content(out) == unbroken


def test_a_damaged_shard_is_written_again(pets, unbroken, tmp_path):
    out = tmp_path / "out"
    pack(pets, out, shard_mb=SHARD_MB)
    damaged = bytearray(unbroken["train-000001.tar"])
    damaged[3000] ^= 1
    (out / "train-000001.tar").write_bytes(damaged)
    packed = pack(pets, out, shard_mb=SHARD_MB)
    assert packed.kept == packed.shards - 1
    assert content(out) == unbroken


def test_a_full_disk_is_one_clear_error_and_is_gone_on_from(pets, unbroken, tmp_path, monkeypatch):
    out, original, calls = tmp_path / "out", os.fsync, []

    def full(descriptor):
        calls.append(1)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(UserError, match="the disk is full; free some space and run the same command again"):
            pack(pets, out, shard_mb=SHARD_MB)
    assert not list(out.glob("*.tmp"))
    assert not (out / "manifest.json").exists()
    assert pack(pets, out, shard_mb=SHARD_MB).kept == len(calls) // 2 - 1
    assert content(out) == unbroken


def test_unreadable_images_stop_it_with_one_error_or_are_left_out_and_listed(pets, tmp_path):
    spoiled = {"train/cat/empty.jpg": b"", "test/cat/text.jpg": b"hello"}
    for name, raw in spoiled.items():
        (pets / name).write_bytes(raw)
    with pytest.raises(UserError) as caught:
        pack(pets, tmp_path / "out")
    for words in ("2 images cannot be used", "train/cat/empty.jpg: the file is empty",
                  "test/cat/text.jpg: not an image", "--unreadable skip"):  # fmt: skip
        assert words in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    packed = pack(pets, tmp_path / "skipping", unreadable="skip")
    assert {item["path"] for item in packed.manifest["unreadable"]} == set(spoiled)
    assert packed.manifest["splits"]["train"]["per_class"] == {"cat": 20, "dog.x": 16}
    assert "2 images cannot be used" in str(packed)
    for name in spoiled:
        (pets / name).unlink()
    pack(pets, tmp_path / "out")
    pack(pets, tmp_path / "clean")
    assert content(tmp_path / "out") == content(tmp_path / "clean")


def test_finished_shards_are_never_replaced_by_others(pets, unbroken, tmp_path):
    out = tmp_path / "out"
    pack(pets, out, shard_mb=SHARD_MB)

    def refused(**options):
        with pytest.raises(UserError, match="holds shards of other images or settings"):
            pack(pets, out, **{"shard_mb": SHARD_MB, **options})
        assert content(out) == unbroken

    refused(shard_mb=2 * SHARD_MB)
    refused(splits=["train"])
    (pets / "train" / "cat" / "000.png").write_bytes((pets / "train" / "cat" / "001.png").read_bytes())
    refused()
    write_files(tmp_path / "others", {"train-000000.tar": b"precious"})
    with pytest.raises(UserError, match="was not written by vitmods data pack"):
        pack(pets, tmp_path / "others")
    assert content(tmp_path / "others") == {"train-000000.tar": b"precious"}


def test_leftovers_of_an_unfinished_pack_with_other_settings_go(pets, unbroken, tmp_path):
    out = tmp_path / "out"
    killed_at(6, "within", lambda: pack(pets, out, shard_mb=SHARD_MB / 2))
    pack(pets, out, shard_mb=SHARD_MB)
    assert content(out) == unbroken


@pytest.mark.parametrize(("options", "message"), [
    ({"splits": ["tset"]}, r"a split \"tset\"\. Did you mean 'test'"),
    ({"splits": ["val"]}, "does not have a split"),
    ({"shard_mb": 0}, "larger than 0"),
    ({"unreadable": "ignore"}, 'must be "stop" or "skip"'),
])  # fmt: skip
def test_what_cannot_be_packed(pets, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        pack(pets, tmp_path / "out", **options)


def test_two_packs_of_one_folder_and_images_without_a_class_are_refused(pets, tmp_path, make_folder):
    with (
        alone_in(files.make_folder(tmp_path / "out")),
        pytest.raises(UserError, match="Another process is packing into"),
    ):
        pack(pets, tmp_path / "out")
    assert set(pack(pets, tmp_path / "out", splits=["test"]).manifest["splits"]) == {"test"}
    with pytest.raises(UserError, match="does not say the class of its images"):
        pack(make_folder({".": 3}, under="loose"), tmp_path / "none")
