"""The decoded-once store: in memory and on disk alike, atomic, repaired when damaged."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods.data import store as store_module
from vitmods.data.geometry import Geometry
from vitmods.data.records import Records
from vitmods.data.sources.folder import folder
from vitmods.data.store import cache_key, open_store, read_cache
from vitmods.util.errors import UserError

GEOMETRY = Geometry((8, 8))


@pytest.fixture
def root(make_folder) -> Path:
    root = make_folder({"cat": 5, "dog": 4}, size=(10, 14))
    (root / "cat" / "broken.png").write_bytes(b"no image")
    return root


def records(root: Path) -> Records:
    return folder(str(root)).splits["train"]


def same(a: store_module.Store, b: store_module.Store) -> bool:
    arrays = zip(a.index.to_arrays().values(), b.index.to_arrays().values(), strict=True)
    return np.array_equal(a.pixels, b.pixels) and all(np.array_equal(x, y) for x, y in arrays)


def cache_files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("geometry", [GEOMETRY, Geometry((8, 8), 0.5, whole=True)])
@pytest.mark.parametrize("channels", [1, 3])
def test_memory_and_disk_hold_the_same(root: Path, tmp_path: Path, geometry: Geometry, channels: int) -> None:
    in_memory = open_store(records(root), geometry, channels, None)
    built = open_store(records(root), geometry, channels, tmp_path / "cache")
    again = open_store(records(root), geometry, channels, tmp_path / "cache")
    assert same(in_memory, built)
    assert same(in_memory, again)
    assert isinstance(again.pixels, np.memmap)
    assert len(in_memory) == 9
    assert in_memory.index.unreadable[0][0] == records(root).ids.index("cat/broken.png")
    assert in_memory.image(3).shape[0] == channels


def test_a_cache_is_not_decoded_again(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(records(root), GEOMETRY, 3, tmp_path)
    monkeypatch.setattr(store_module, "build", None)
    open_store(records(root), GEOMETRY, 3, tmp_path)


def test_the_key_depends_on_all_that_decides_the_content(root: Path) -> None:
    keys = {
        cache_key(records(root), GEOMETRY, 3),
        cache_key(records(root), GEOMETRY, 1),
        cache_key(records(root), Geometry((8, 8), 0.9), 3),
        cache_key(records(root), Geometry((8, 8), whole=True), 3),
        cache_key(records(root), Geometry((8, 8), whole=True, shrink=False), 3),
        cache_key(records(root), Geometry((8, 8), resample="bilinear"), 3),
        cache_key(records(root), Geometry((8, 8), resample="big_vision"), 3),
        cache_key(records(root).take(np.arange(5)), GEOMETRY, 3),
    }
    (root / "cat" / "000.png").write_bytes((root / "cat" / "001.png").read_bytes())
    keys.add(cache_key(records(root), GEOMETRY, 3))
    assert len(keys) == 9


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["pixels.bin", "index.npz"])
def test_a_damaged_cache_is_built_again(root: Path, tmp_path: Path, damage, file: str) -> None:
    cache = tmp_path / "cache"
    whole = open_store(records(root), GEOMETRY, 3, None)
    open_store(records(root), GEOMETRY, 3, cache)
    damage(next(cache.rglob(file)))
    assert same(open_store(records(root), GEOMETRY, 3, cache), whole)
    assert same(read_cache(next(cache.iterdir())), whole)
    assert cache_files(cache) == ["index.npz", "pixels.bin"]


def test_a_build_that_dies_leaves_nothing(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(records: Records, geometry: Geometry, channels: int, out) -> None:
        out.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module, "build", dies)
    with pytest.raises(KeyboardInterrupt):
        open_store(records(root), GEOMETRY, 3, tmp_path / "cache")
    assert cache_files(tmp_path / "cache") == []


def test_remains_of_a_killed_build_are_removed_in_time(root: Path, tmp_path: Path) -> None:
    key = cache_key(records(root), GEOMETRY, 3)
    old, young, other = (tmp_path / name for name in (f"{key}.old", f"{key}.young", "other.old"))
    for folder_, days in ((old, 9), (young, 1), (other, 9)):
        folder_.mkdir()
        os.utime(folder_, (0, time.time() - days * 24 * 3600))
    open_store(records(root), GEOMETRY, 3, tmp_path)
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def _open_in_process(root: Path, cache: Path, barrier, results) -> None:
    barrier.wait()
    results.put(open_store(records(root), GEOMETRY, 3, cache).pixels.tobytes())


def test_processes_that_build_at_once_agree(root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (root, tmp_path / "cache", barrier, results)
    processes = [context.Process(target=_open_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    contents = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert contents == {open_store(records(root), GEOMETRY, 3, None).pixels.tobytes()}
    assert cache_files(tmp_path / "cache") == ["index.npz", "pixels.bin"]


def test_all_but_small_sets_go_to_the_users_cache(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert not isinstance(open_store(records(root), GEOMETRY, 3, None).pixels, np.memmap)
    monkeypatch.setattr(store_module, "SMALL", 1000)
    assert isinstance(open_store(records(root), GEOMETRY, 3, None).pixels, np.memmap)
    assert (tmp_path / "home" / "vitmods").is_dir()


def test_without_a_place_for_caches_sets_stay_in_memory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(store_module, "SMALL", 1000)
    assert not isinstance(open_store(records(root), GEOMETRY, 3, None).pixels, np.memmap)
    monkeypatch.setattr(store_module, "MEMORY_LIMIT", 1000)
    with pytest.raises(UserError, match="cannot be written"):
        open_store(records(root), GEOMETRY, 3, None)


def test_other_images_of_the_same_stamps_are_others(tmp_path: Path) -> None:
    ids = tuple(f"{i:03d}" for i in range(20))
    for value in (1, 2):
        pixels = np.full((8, 8), value, dtype=np.uint8)
        made = Records(ids, np.zeros(20, np.int64), ids, lambda key, pixels=pixels: pixels, np.arange(20))
        assert (open_store(made, GEOMETRY, 1, tmp_path).image(3) == value).all()


def test_processes_share_what_the_first_has_decoded(make_folder, tmp_path: Path) -> None:
    """A study's parent reads the images; its workers only map them."""
    root = make_folder({"cat": 8, "dog": 8})
    script = (
        "import sys; from vitmods import data; from vitmods.data import store; from vitmods.recipes import plain;"
        "store.SMALL = 0; store.build = store.build if sys.argv[2] == 'first' else None;"
        "print(type(data.load(sys.argv[1], img_size=8, augment=plain().augment).splits['train'].store.pixels).__name__)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home")}
    for which in ("first", "second", "third"):
        command = [sys.executable, "-c", script, str(root), which]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "memmap"


def test_originals_are_expected_to_be_as_large_as_they_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = Geometry((4, 4), whole=True, shrink=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for limit, mapped in ((10 * 10 * 14 * 3, False), (10 * 10 * 14 * 3 - 1, True)):  # one of the ten cannot be read
        monkeypatch.setattr(store_module, "SMALL", limit)
        store = open_store(records(root), originals, 3, None)
        assert isinstance(store.pixels, np.memmap) == mapped
        assert store.image(0).shape == (3, 10, 14)


def test_a_cache_folder_that_cannot_be_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot be written: .* give another folder"):
        open_store(records(root), GEOMETRY, 3, tmp_path / "file" / "cache")


def test_verifying_a_large_cache_reads_a_part_of_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(records(root), GEOMETRY, 3, tmp_path)
    path = next(tmp_path.rglob("pixels.bin"))
    content = bytearray(path.read_bytes())
    content[3 * 64] ^= 1  # in the second image
    path.write_bytes(bytes(content))
    assert read_cache(path.parent) is None
    monkeypatch.setattr(store_module, "VERIFIED_BYTES", store.pixels.size // 2)
    assert read_cache(path.parent) is not None


def test_an_empty_split(root: Path, tmp_path: Path) -> None:
    nothing = records(root).take(np.array([], dtype=np.int64))
    for cache in (None, tmp_path):
        store = open_store(nothing, GEOMETRY, 3, cache)
        assert len(store) == 0
        assert store.stack is None


def test_images_of_one_shape_are_a_stack(root: Path) -> None:
    assert open_store(records(root), GEOMETRY, 3, None).stack.shape == (9, 3, 8, 8)
    Image.new("RGB", (30, 10)).save(root / "dog" / "wide.png")
    store = open_store(records(root), Geometry((8, 8), whole=True), 3, None)
    assert store.stack is None
    assert store.image(9).shape == (3, 8, 24)
