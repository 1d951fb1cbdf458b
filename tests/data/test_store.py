"""The decoded-once store: in memory and on disk alike, atomic, repaired when damaged."""

import errno
import multiprocessing
import os
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods.data import store as store_module
from vitmods.data.geometry import Geometry
from vitmods.data.records import Records
from vitmods.data.sources.folder import folder
from vitmods.data.store import cache_key, open_store, read_cache
from vitmods.data.threads import in_order
from vitmods.util.errors import UserError

GEOMETRY = Geometry((8, 8))


@pytest.fixture
def root(make_folder):
    root = make_folder({"cat": 5, "dog": 4}, size=(10, 14))
    (root / "cat" / "broken.png").write_bytes(b"no image")
    return root


def records(root):
    return folder(str(root)).splits["train"]


def same(a, b):
    arrays = [zip(*(vars(store.index)[name] for store in (a, b)), strict=True) for name in vars(a.index)]
    return np.array_equal(a.pixels, b.pixels) and all(np.array_equal(x, y) for pairs in arrays for x, y in pairs)


def cache_files(cache):
    return {path.name: path.stat().st_size for path in sorted(cache.rglob("*")) if path.is_file()}


def forbid_decoding(monkeypatch):
    monkeypatch.setattr(store_module, "decode", lambda *_: pytest.fail("nothing is left to decode"))


@pytest.mark.parametrize(("geometry", "channels"), [(GEOMETRY, 1), (Geometry((8, 8), 0.5, whole=True), 3)])
def test_memory_and_disk_hold_the_same(root, tmp_path, geometry, channels):
    in_memory, built, again = (
        open_store(records(root), geometry, channels, folder)
        for folder in (None, tmp_path / "cache", tmp_path / "cache")
    )
    assert same(in_memory, built)
    assert same(in_memory, again)
    assert isinstance(again.pixels, np.memmap)
    assert len(in_memory) == 9
    assert in_memory.index.unreadable[0][0] == records(root).ids.index("cat/broken.png")
    assert in_memory.image(3).shape[0] == channels


def test_the_key_depends_on_all_that_decides_the_content(root):
    geometries = ({}, {"ratio": 0.9}, {"whole": True}, {"whole": True, "shrink": False}, {"resample": "bilinear"},
                  {"resample": "big_vision"})  # fmt: skip
    keys = {cache_key(records(root), Geometry((8, 8), **fields), 3) for fields in geometries}
    keys |= {cache_key(records(root), GEOMETRY, 1), cache_key(records(root), None, 3)}
    assert cache_key(records(root).take(np.arange(5)), GEOMETRY, 3) in keys, "splits share the cache of their source"
    changed = root / "cat" / "000.png"
    times = changed.stat()
    changed.write_bytes(bytes(changed.stat().st_size))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    keys.add(cache_key(records(root), GEOMETRY, 3))
    assert len(keys) == 9


def test_splits_of_one_source_decode_each_image_once(root, tmp_path, monkeypatch):
    complete = open_store(records(root), GEOMETRY, 3, None)
    parts = [np.array(part) for part in ((7, 2, 5), (0, 4), (2, 3, 0, 9), (8, 1, 6))]
    for part in parts:
        store = open_store(records(root).take(part), GEOMETRY, 3, tmp_path)
        kept = [int(np.flatnonzero(complete.index.kept == i)[0]) for i in part[store.index.kept]]
        assert [store.image(i).tobytes() for i in range(len(store))] == [complete.image(i).tobytes() for i in kept]
        np.testing.assert_array_equal(store.batch(np.arange(len(store))), [complete.image(i) for i in kept])
    assert cache_files(tmp_path)["pixels.bin"] == complete.pixels.size
    forbid_decoding(monkeypatch)
    assert len(open_store(records(root), GEOMETRY, 3, tmp_path)) == len(complete)


def test_images_are_looked_through_once(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store_module, "FEW", 0)
    listed = open_store(records(root), None, 3, None).index
    complete = open_store(records(root), GEOMETRY, 3, None).index
    for name in ("kept", "native", "digests"):
        np.testing.assert_array_equal(vars(listed)[name], vars(complete)[name])
    assert listed.unreadable == complete.unreadable
    forbid_decoding(monkeypatch)
    np.testing.assert_array_equal(open_store(records(root), None, 3, None).index.native, complete.native)
    assert cache_files(tmp_path / "home")["pixels.bin"] == 0


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path, place=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_cache_is_built_again(root, tmp_path, damage):
    complete = open_store(records(root), GEOMETRY, 3, None)
    for file in ("pixels.bin", "index.npz"):
        open_store(records(root), GEOMETRY, 3, tmp_path / "cache")
        damage(next((tmp_path / "cache").rglob(file)))
        assert same(open_store(records(root), GEOMETRY, 3, tmp_path / "cache"), complete)
        assert same(read_cache(next((tmp_path / "cache").iterdir()), records(root)), complete)


def test_a_build_that_dies_leaves_nothing(root, tmp_path, monkeypatch):
    def dies(*arguments, **options):
        yield from islice(in_order(*arguments, **options), 3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "in_order", dies)
        with pytest.raises(KeyboardInterrupt):
            open_store(records(root), GEOMETRY, 3, tmp_path / "cache")
    assert sum(cache_files(tmp_path / "cache").values()) == 0


def test_remains_of_a_killed_process_are_written_over(root, tmp_path, monkeypatch):
    counts = []

    def counted(make, numbers, *options, **more):
        counts.append(len(numbers))
        return in_order(make, numbers, *options, **more)

    monkeypatch.setattr(store_module, "in_order", counted)
    half, complete = np.arange(5), open_store(records(root), GEOMETRY, 3, None)
    open_store(records(root).take(half), GEOMETRY, 3, tmp_path)
    with open(next(tmp_path.rglob("pixels.bin")), "ab") as pixels:
        pixels.write(b"what a killed process has left")
    assert same(open_store(records(root), GEOMETRY, 3, tmp_path), complete)
    assert counts == [10, 5, 5]
    assert cache_files(tmp_path)["pixels.bin"] == complete.pixels.size


def test_a_full_disk(root, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot be written: .* give another folder"):
        open_store(records(root), GEOMETRY, 3, tmp_path / "file" / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store_module.os, "fsync", full)
    monkeypatch.setattr(store_module, "SMALL", 0)
    assert not isinstance(open_store(records(root), GEOMETRY, 3, None).pixels, np.memmap)
    with pytest.raises(UserError, match=r"cannot be written: No space left .* give another folder"):
        open_store(records(root), GEOMETRY, 3, tmp_path / "cache")
    assert sum(cache_files(tmp_path).get(name, 0) for name in ("pixels.bin", "index.npz")) == 0


@pytest.mark.parametrize("is_named", [False, True])
def test_caches_of_the_user_that_are_not_used_are_removed_in_time(root, tmp_path, monkeypatch, is_named):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store_module, "SMALL", 0)
    cache = tmp_path / "vitmods" / "images"
    old, young = cache / "old", cache / "young"
    for other, days in ((old, 31), (young, 29)):
        other.mkdir(parents=True)
        os.utime(other, (0, time.time() - days * 24 * 3600))
    open_store(records(root), GEOMETRY, 3, cache if is_named else None)
    assert (old.exists(), young.exists()) == (is_named, True)
    used = cache / cache_key(records(root), GEOMETRY, 3)
    os.utime(used, (0, 0))
    open_store(records(root), GEOMETRY, 3, cache)
    assert time.time() - used.stat().st_mtime < 3600


def _open_in_process(root, cache, barrier, results):
    barrier.wait()
    results.put(open_store(records(root), GEOMETRY, 3, cache).pixels.tobytes())


def test_processes_that_build_at_once_agree(root, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (root, tmp_path / "cache", barrier, results)
    processes = [context.Process(target=_open_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    contents = {results.get(timeout=300) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert contents == {open_store(records(root), GEOMETRY, 3, None).pixels.tobytes()}
    assert cache_files(tmp_path / "cache")["pixels.bin"] == len(contents.pop())


def test_all_but_small_sets_go_to_the_users_cache_or_stay_in_memory_without_a_place(root, tmp_path, monkeypatch):
    def is_on_disk(home):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        return isinstance(open_store(records(root), GEOMETRY, 3, None).pixels, np.memmap)

    assert not is_on_disk("home")
    monkeypatch.setattr(store_module, "SMALL", 1000)
    assert is_on_disk("home")
    assert (tmp_path / "home" / "vitmods").is_dir()
    (tmp_path / "file").write_text("no folder")
    assert not is_on_disk("file")
    monkeypatch.setattr(store_module, "MEMORY_LIMIT", 1000)
    with pytest.raises(UserError, match="cannot be written"):
        is_on_disk("file")


def test_other_images_of_the_same_stamps_are_others(tmp_path):
    ids = tuple(f"{i:03d}" for i in range(20))
    for value in (1, 2):
        pixels = np.full((8, 8), value, dtype=np.uint8)
        made = Records(ids, np.zeros(20, np.int64), ids, lambda key, pixels=pixels: pixels, np.arange(20))
        assert (open_store(made, GEOMETRY, 1, tmp_path).image(3) == value).all()


def test_originals_are_expected_to_be_as_large_as_they_are(root, tmp_path, monkeypatch):
    originals = Geometry((4, 4), whole=True, shrink=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for limit, mapped in ((10 * 10 * 14 * 3, False), (10 * 10 * 14 * 3 - 1, True)):  # one of the ten cannot be read
        monkeypatch.setattr(store_module, "SMALL", limit)
        store = open_store(records(root), originals, 3, None)
        assert isinstance(store.pixels, np.memmap) == mapped
        assert store.image(0).shape == (3, 10, 14)


def test_verifying_a_large_cache_reads_a_part_of_it(root, tmp_path, monkeypatch):
    store = open_store(records(root), GEOMETRY, 3, tmp_path)
    path = next(tmp_path.rglob("pixels.bin"))
    flip_a_bit(path, 3 * 64)  # in the second image
    assert read_cache(path.parent, records(root)) is None
    monkeypatch.setattr(store_module, "VERIFIED_BYTES", store.pixels.size // 2)
    assert read_cache(path.parent, records(root)) is not None


def test_an_empty_split_and_images_of_one_shape(root, tmp_path):
    nothing = records(root).take(np.array([], dtype=np.int64))
    for cache in (None, tmp_path):
        store = open_store(nothing, GEOMETRY, 3, cache)
        assert len(store) == 0
        assert store.batch(np.arange(0)) is None
    assert open_store(records(root), GEOMETRY, 3, None).batch(np.array([3, 3, 8])).shape == (3, 3, 8, 8)
    Image.new("RGB", (30, 10)).save(root / "dog" / "wide.png")
    store = open_store(records(root), Geometry((8, 8), whole=True), 3, None)
    assert store.batch(np.arange(2)) is None
    assert store.image(9).shape == (3, 8, 24)
