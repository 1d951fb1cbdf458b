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


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The user's cache, to which all sets go, however small."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store_module, "SMALL", 0)
    return tmp_path / "home"


def records(root):
    return folder(str(root)).splits["train"]


def opened(root, cache=None, geometry=GEOMETRY, channels=3):
    """The store of a folder, or of records."""
    return open_store(root if isinstance(root, Records) else records(root), geometry, channels, cache)


def same(a, b):
    arrays = [zip(*(vars(store.index)[name] for store in (a, b)), strict=True) for name in vars(a.index)]
    return np.array_equal(a.pixels, b.pixels) and all(np.array_equal(x, y) for pairs in arrays for x, y in pairs)


def cache_files(cache):
    return {path.name: path.stat().st_size for path in sorted(cache.rglob("*")) if path.is_file()}


def forbid_decoding(monkeypatch):
    monkeypatch.setattr(store_module, "decode", lambda *_: pytest.fail("nothing is left to decode"))


@pytest.mark.parametrize(("geometry", "channels"), [(GEOMETRY, 1), (Geometry((8, 8), 0.5, whole=True), 3)])
def test_memory_and_disk_hold_the_same(root, tmp_path, geometry, channels):
    in_memory, built, again = (opened(root, cache, geometry, channels) for cache in (None, tmp_path, tmp_path))
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
    changed.write_bytes(bytes(times.st_size))
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    keys.add(cache_key(records(root), GEOMETRY, 3))
    assert len(keys) == 9


def test_splits_of_one_source_decode_each_image_once(root, tmp_path, monkeypatch):
    complete = opened(root)
    for part in map(np.array, ((7, 2, 5), (0, 4), (2, 3, 0, 9), (8, 1, 6))):
        store = opened(records(root).take(part), tmp_path)
        kept = [int(np.flatnonzero(complete.index.kept == i)[0]) for i in part[store.index.kept]]
        assert [store.image(i).tobytes() for i in range(len(store))] == [complete.image(i).tobytes() for i in kept]
        np.testing.assert_array_equal(store.batch(np.arange(len(store))), [complete.image(i) for i in kept])
    assert cache_files(tmp_path)["pixels.bin"] == complete.pixels.size
    forbid_decoding(monkeypatch)
    assert len(opened(root, tmp_path)) == len(complete)


def test_images_are_looked_through_once(root, home, monkeypatch):
    monkeypatch.setattr(store_module, "FEW", 0)
    listed, complete = opened(root, geometry=None).index, opened(root, home / "other").index
    for name in ("kept", "native", "digests"):
        np.testing.assert_array_equal(vars(listed)[name], vars(complete)[name])
    assert listed.unreadable == complete.unreadable
    forbid_decoding(monkeypatch)
    np.testing.assert_array_equal(opened(root, geometry=None).index.native, complete.native)
    assert cache_files(home / "vitmods")["pixels.bin"] == 0


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [
    flip_a_bit, Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-1]),
])  # fmt: skip
def test_a_damaged_cache_is_built_again(root, tmp_path, damage):
    complete = opened(root)
    for file in ("pixels.bin", "index.npz"):
        opened(root, tmp_path / "cache")
        damage(next((tmp_path / "cache").rglob(file)))
        assert same(opened(root, tmp_path / "cache"), complete)
        assert same(read_cache(next((tmp_path / "cache").iterdir()), records(root)), complete)


def test_a_build_that_dies_leaves_nothing_and_remains_of_a_killed_process_are_written_over(root, tmp_path, monkeypatch):
    counts, complete = [], opened(root)

    def dies(*arguments, **options):
        yield from islice(in_order(*arguments, **options), 3)
        raise KeyboardInterrupt

    def counted(make, numbers, *options, **more):
        counts.append(len(numbers))
        return in_order(make, numbers, *options, **more)

    monkeypatch.setattr(store_module, "in_order", dies)
    with pytest.raises(KeyboardInterrupt):
        opened(root, tmp_path)
    assert sum(cache_files(tmp_path).get(name, 0) for name in ("pixels.bin", "index.npz")) == 0
    monkeypatch.setattr(store_module, "in_order", counted)
    opened(records(root).take(np.arange(5)), tmp_path)
    with open(next(tmp_path.rglob("pixels.bin")), "ab") as pixels:
        pixels.write(b"what a killed process has left")
    assert same(opened(root, tmp_path), complete)
    assert counts == [5, 5]
    assert cache_files(tmp_path)["pixels.bin"] == complete.pixels.size


def test_a_full_disk(root, tmp_path, home, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot be written: .* give another folder"):
        opened(root, tmp_path / "file" / "cache")
    monkeypatch.setattr(store_module.os, "fsync", full)
    assert not isinstance(opened(root).pixels, np.memmap)
    with pytest.raises(UserError, match=r"cannot be written: No space left .* give another folder"):
        opened(root, tmp_path / "cache")
    assert sum(cache_files(tmp_path).get(name, 0) for name in ("pixels.bin", "index.npz")) == 0


@pytest.mark.parametrize("is_named", [False, True])
def test_caches_of_the_user_that_are_not_used_are_removed_in_time(root, home, is_named):
    cache = home / "vitmods" / "images"
    old, young = cache / "old", cache / "young"
    for other, days in ((old, 31), (young, 29)):
        other.mkdir(parents=True)
        os.utime(other, (0, time.time() - days * 24 * 3600))
    opened(root, cache if is_named else None)
    assert (old.exists(), young.exists()) == (is_named, True)
    used = cache / cache_key(records(root), GEOMETRY, 3)
    os.utime(used, (0, 0))
    opened(root, cache)
    assert time.time() - used.stat().st_mtime < 3600


def _open_in_process(root, cache, barrier, results):
    barrier.wait()
    results.put(opened(root, cache).pixels.tobytes())


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
    assert contents == {opened(root).pixels.tobytes()}
    assert cache_files(tmp_path / "cache")["pixels.bin"] == len(contents.pop())


def test_all_but_small_sets_go_to_the_users_cache_or_stay_in_memory_without_a_place(root, tmp_path, home, monkeypatch):
    def is_on_disk(limit, geometry=GEOMETRY):
        monkeypatch.setattr(store_module, "SMALL", limit)
        return isinstance(opened(root, None, geometry).pixels, np.memmap)

    assert (is_on_disk(1 << 20), is_on_disk(1000)) == (False, True)
    assert (home / "vitmods").is_dir()
    originals = Geometry((4, 4), whole=True, shrink=False)  # of which one of the ten cannot be read
    assert opened(root, None, originals).image(0).shape == (3, 10, 14)
    assert (is_on_disk(10 * 10 * 14 * 3, originals), is_on_disk(10 * 10 * 14 * 3 - 1, originals)) == (False, True)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not is_on_disk(1000)
    monkeypatch.setattr(store_module, "MEMORY_LIMIT", 1000)
    with pytest.raises(UserError, match="cannot be written"):
        is_on_disk(1000)


def test_other_images_of_the_same_stamps_are_others(tmp_path):
    ids = tuple(f"{i:03d}" for i in range(20))
    for value in (1, 2):
        pixels = np.full((8, 8), value, dtype=np.uint8)
        made = Records(ids, np.zeros(20, np.int64), ids, lambda key, pixels=pixels: pixels, np.arange(20))
        assert (opened(made, tmp_path, channels=1).image(3) == value).all()


def test_an_empty_split_and_images_of_one_shape(root, tmp_path):
    nothing = records(root).take(np.array([], dtype=np.int64))
    for cache in (None, tmp_path):
        store = opened(nothing, cache)
        assert len(store) == 0
        assert store.batch(np.arange(0)) is None
    assert opened(root).batch(np.array([3, 3, 8])).shape == (3, 3, 8, 8)
    Image.new("RGB", (30, 10)).save(root / "dog" / "wide.png")
    store = opened(root, None, Geometry((8, 8), whole=True))
    assert store.batch(np.arange(2)) is None
    assert store.image(9).shape == (3, 8, 24)
