"""pack: the same images give the same bytes, however often it is stopped; nothing that is not its own is replaced."""

import errno
import json
import os
import signal
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from vitmods.data import pack as pack_module
from vitmods.data.pack import alone_in, pack
from vitmods.util import files
from vitmods.util.errors import UserError

SHARD_MB = 0.02  # about ten small images


@pytest.fixture
def pets(make_folder) -> Path:
    make_folder({"train/cat": 20, "train/dog.x": 16})
    return make_folder({"test/cat": 5, "test/dog.x": 3}, seed=7000)


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """What an unbroken pack of pets gives: filled by the first test that asks `unbroken`."""
    return {}


@pytest.fixture
def unbroken(whole: dict[str, bytes], pets: Path, tmp_path: Path) -> dict[str, bytes]:
    if not whole:
        pack(pets, tmp_path / "whole", shard_mb=SHARD_MB)
        whole.update(content(tmp_path / "whole"))
    return whole


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_members_are_webdatasets_and_the_bytes_of_the_files(pets: Path, tmp_path: Path) -> None:
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
            rows = json.loads(path.with_suffix(".json").read_text())["images"]
            with tarfile.open(path) as tar:
                members = [(m.name, tar.extractfile(m).read()) for m in tar]
            assert len(members) == 2 * len(rows)
            for row, (name, raw), (label_name, label) in zip(rows, members[::2], members[1::2], strict=True):
                assert (name, label_name) == (row[2], row[2].replace(".png", ".cls"))
                assert int(label) == row[1] == packed.manifest["classes"].index(Path(row[0]).parts[1])
                assert path.read_bytes()[row[3] : row[3] + row[4]] == raw
                seen[row[0]] = raw
    assert len(packed.manifest["splits"]["train"]["shards"]) > 2
    assert seen == {path.relative_to(pets).as_posix(): path.read_bytes() for path in pets.rglob("*.png")}


def test_shards_mix_the_classes(pets: Path, tmp_path: Path) -> None:
    pack(pets, tmp_path / "out", shard_mb=SHARD_MB)
    for path in (tmp_path / "out").glob("train-*[0-2].json"):
        assert len({row[1] for row in json.loads(path.read_text())["images"]}) == 2


def test_the_same_images_elsewhere_give_the_same_bytes(pets: Path, unbroken: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    os.rename(pets, tmp_path / "moved" / "pets")
    for path in (tmp_path / "moved" / "pets").rglob("*.png"):
        os.utime(path, (1, 1))
    pack(tmp_path / "moved" / "pets", tmp_path / "out", shard_mb=SHARD_MB, workers=3)
    assert content(tmp_path / "out") == unbroken


def killed_at(call: int, moment: str, run: Callable[[], object]) -> None:
    """Run in a forked process that SIGKILLs itself before, in the middle of or after the call-th file is written."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    original, calls = files.write_atomically, []

    def die(file) -> None:
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


@pytest.mark.parametrize("moment", ["before", "within", "after"])
@pytest.mark.parametrize("call", [1, 4, 7])
def test_killed_and_called_again_gives_the_same_bytes(
    pets: Path, unbroken: dict[str, bytes], tmp_path: Path, call: int, moment: str
) -> None:
    out = tmp_path / "out"
    killed_at(call, moment, lambda: pack(pets, out, shard_mb=SHARD_MB))
    assert not (out / "manifest.json").exists()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    again = pack(pets, out, shard_mb=SHARD_MB)
    assert again.kept == len(finished)
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items())
    assert content(out) == unbroken


def test_a_kill_while_the_manifest_is_written(pets: Path, unbroken: dict[str, bytes], tmp_path: Path) -> None:
    out, calls = tmp_path / "out", len(unbroken)
    killed_at(calls, "within", lambda: pack(pets, out, shard_mb=SHARD_MB))
    assert not (out / "manifest.json").exists()
    assert pack(pets, out, shard_mb=SHARD_MB).kept == (calls - 1) / 2
    assert content(out) == unbroken


def test_a_damaged_shard_is_written_again(pets: Path, tmp_path: Path) -> None:
    pack(pets, tmp_path / "out", shard_mb=SHARD_MB)
    whole = content(tmp_path / "out")
    damaged = bytearray(whole["train-000001.tar"])
    damaged[3000] ^= 1
    (tmp_path / "out" / "train-000001.tar").write_bytes(damaged)
    packed = pack(pets, tmp_path / "out", shard_mb=SHARD_MB)
    assert packed.kept == packed.shards - 1
    assert content(tmp_path / "out") == whole


def test_a_full_disk_is_one_clear_error_and_is_gone_on_from(
    pets: Path, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, original, calls = tmp_path / "out", os.fsync, []

    def full(descriptor: int) -> None:
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
    assert pack(pets, out, shard_mb=SHARD_MB).kept == len(calls) // 4
    assert content(out) == unbroken


def spoil(pets: Path) -> None:
    (pets / "train" / "cat" / "empty.jpg").write_bytes(b"")
    (pets / "test" / "cat" / "text.jpg").write_text("hello")


def test_unreadable_images_stop_it_with_one_error(pets: Path, tmp_path: Path) -> None:
    spoil(pets)
    with pytest.raises(UserError) as caught:
        pack(pets, tmp_path / "out")
    text = str(caught.value)
    assert "2 images cannot be used" in text
    assert "train/cat/empty.jpg: the file is empty" in text
    assert "test/cat/text.jpg: not an image" in text
    assert "--unreadable skip" in text
    assert not (tmp_path / "out" / "manifest.json").exists()
    for path in (pets / "train" / "cat" / "empty.jpg", pets / "test" / "cat" / "text.jpg"):
        path.unlink()
    pack(pets, tmp_path / "out")
    pack(pets, tmp_path / "clean")
    assert content(tmp_path / "out") == content(tmp_path / "clean")


def test_unreadable_images_are_left_out_and_listed(pets: Path, tmp_path: Path) -> None:
    spoil(pets)
    packed = pack(pets, tmp_path / "out", unreadable="skip")
    assert {item["path"] for item in packed.manifest["unreadable"]} == {"train/cat/empty.jpg", "test/cat/text.jpg"}
    assert packed.manifest["splits"]["train"]["per_class"] == {"cat": 20, "dog.x": 16}
    assert "2 images cannot be used" in str(packed)


@pytest.mark.parametrize("change", ["settings", "images"])
def test_finished_shards_are_never_replaced_by_others(pets: Path, tmp_path: Path, change: str) -> None:
    pack(pets, tmp_path / "out", shard_mb=SHARD_MB)
    before = content(tmp_path / "out")
    if change == "images":
        (pets / "train" / "cat" / "000.png").write_bytes((pets / "train" / "cat" / "001.png").read_bytes())
    with pytest.raises(UserError, match="holds shards of other images or settings"):
        pack(pets, tmp_path / "out", shard_mb=2 * SHARD_MB if change == "settings" else SHARD_MB)
    assert content(tmp_path / "out") == before


def test_a_finished_folder_is_not_made_smaller(pets: Path, tmp_path: Path) -> None:
    pack(pets, tmp_path / "out")
    before = content(tmp_path / "out")
    with pytest.raises(UserError, match="holds shards of other images or settings"):
        pack(pets, tmp_path / "out", splits=["train"])
    assert content(tmp_path / "out") == before


@pytest.mark.parametrize("call", [8, 9])
def test_leftovers_of_an_unfinished_pack_with_other_settings_go(pets: Path, tmp_path: Path, call: int) -> None:
    out = tmp_path / "out"
    killed_at(call, "within", lambda: pack(pets, out, shard_mb=SHARD_MB / 2))
    pack(pets, out)
    pack(pets, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_tar_files_of_others_are_not_touched(pets: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-000000.tar").write_bytes(b"precious")
    with pytest.raises(UserError, match="was not written by vitmods data pack"):
        pack(pets, tmp_path / "out")
    assert content(tmp_path / "out") == {"train-000000.tar": b"precious"}


def test_some_splits_alone(pets: Path, tmp_path: Path) -> None:
    assert set(pack(pets, tmp_path / "out", splits=["test"]).manifest["splits"]) == {"test"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"splits": ["tset"]}, r"no split \"tset\"\. Did you mean 'test'"),
        ({"splits": ["val"]}, "has no split"),
        ({"shard_mb": 0}, "larger than 0"),
        ({"unreadable": "ignore"}, 'must be "stop" or "skip"'),
    ],
)
def test_what_cannot_be_packed(pets: Path, tmp_path: Path, options, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack(pets, tmp_path / "out", **options)


def test_two_processes_do_not_pack_into_one_folder(pets: Path, tmp_path: Path) -> None:
    with (
        alone_in(files.make_folder(tmp_path / "out")),
        pytest.raises(UserError, match="Another process is packing into"),
    ):
        pack(pets, tmp_path / "out")
    pack(pets, tmp_path / "out")


def test_images_without_a_class_are_not_packed(make_folder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no class of each image, not a class"):
        pack(make_folder({".": 3}), tmp_path / "out")
