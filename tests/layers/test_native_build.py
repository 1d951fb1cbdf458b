"""Native forms are built where a compiler is, kept, fixed when damaged, and done without everywhere else."""

import multiprocessing
import os
import pwd
import shutil
import stat
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest

from vitmods.ops import native
from vitmods.ops.native import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

SOURCE = """
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" int twice(int x) { return 2 * x; }
extern "C" int threads(int wanted) {
    int count = 0;
#pragma omp parallel num_threads(wanted) reduction(+ : count)
    count += 1;
    return count;
}
"""


def forget():
    native.library.cache_clear()


@pytest.fixture
def source(tmp_path, monkeypatch):
    """twice.cpp where the package's sources are looked for, with a cache of its own."""
    path = tmp_path / "sources" / "twice.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", path.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITMODS_NATIVE", raising=False)
    forget()
    yield path
    forget()


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "vitmods" / "native").iterdir())


def compiles(monkeypatch):
    """The names of the sources that are compiled from now on."""
    calls, real = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda source, *rest: calls.append(source.stem) or real(source, *rest))
    return calls


def again():
    forget()
    return native.library("twice")


def test_it_is_built_once_and_kept_for_each_source_and_compiler(source, tmp_path, monkeypatch):
    calls = compiles(monkeypatch)
    assert native.library("twice").twice(21) == again().twice(21) == 42
    assert (calls, len(kept(tmp_path))) == (["twice"], 1)
    source.write_text(SOURCE.replace("2 * x", "3 * x"))
    assert again().twice(21) == 63
    other = tmp_path / "other-compiler"
    other.symlink_to(shutil.which(build.find_compiler()[0]))
    monkeypatch.setenv("CXX", f"{other} -DWITH_ARGUMENTS")
    assert again().twice(21) == 63
    assert len(kept(tmp_path)) == 3


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b + b"more"], ids=range(3))
def test_a_damaged_file_is_built_again(source, tmp_path, monkeypatch, damage):
    native.library("twice")
    [path] = kept(tmp_path)
    content = path.read_bytes()
    path.unlink()  # it is mapped: to cut it short in place would end this process
    path.write_bytes(damage(content))
    calls = compiles(monkeypatch)
    assert again().twice(21) == 42
    assert calls == ["twice"]
    assert all(build._digest(p.read_bytes()) == p.stem.rpartition("-")[2] for p in kept(tmp_path))


def loaded():
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs the list of loaded libraries")
def test_openmp_is_the_one_that_torch_has(source):
    before = loaded()
    threads = native.library("twice").threads(2)
    assert loaded() == before
    assert threads == 2 or not any("libgomp" in path for path in before)


def twice(start):
    start.wait()
    sys.exit(native.library("twice").twice(21))


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_several_processes_at_once(source, tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    running = [context.Process(target=twice, args=[start]) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(300)
    assert [process.exitcode for process in running] == [42, 42, 42]
    assert all(path.suffix == ".so" for path in kept(tmp_path))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for libraries where the user's cache cannot be used."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary" / f"vitmods-{os.getuid()}" / "native"


@pytest.mark.parametrize("cache", ["a file", "no home", "noexec"])
def test_a_cache_that_cannot_be_used_has_a_second_place(source, tmp_path, monkeypatch, temporary, cache):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    if cache == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    elif cache == "noexec":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        statvfs, noexec = os.statvfs, types.SimpleNamespace(f_flag=os.ST_NOEXEC)
        monkeypatch.setattr(os, "statvfs", lambda path: statvfs(path) if Path(path) == temporary else noexec)
    calls = compiles(monkeypatch)
    assert again().twice(21) == 42
    assert again().twice(21) == 42
    assert calls == ["twice"]
    assert len(list(temporary.iterdir())) == 1
    assert stat.S_IMODE(temporary.parent.stat().st_mode) == 0o700


def test_a_temporary_folder_that_is_noexec_does_not_matter(source, tmp_path, monkeypatch, temporary):
    statvfs = os.statvfs
    shm = str(tmp_path / "temporary")
    noexec = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: noexec if str(path).startswith(shm) else statvfs(path))
    assert again().twice(21) == 42
    assert len(kept(tmp_path)) == 1
    assert not temporary.exists()


def test_no_place_is_told_without_compiling(source, tmp_path, monkeypatch, temporary):
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    calls = compiles(monkeypatch)
    with pytest.warns(UserWarning, match="Set XDG_CACHE_HOME"):
        assert again() is None
    assert calls == []


def test_what_others_can_write_is_not_loaded(source, tmp_path, monkeypatch, temporary):
    native.library("twice")
    [path] = kept(tmp_path)
    calls = compiles(monkeypatch)
    path.chmod(0o666)
    assert again().twice(21) == 42
    [path] = kept(tmp_path)  # built again in its place
    assert calls == ["twice"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    foreign = types.SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o600)
    assert not build._is_own(types.SimpleNamespace(stat=lambda: foreign))


def test_switched_off_and_no_compiler_is_no_reason_to_warn(source, monkeypatch):
    calls = compiles(monkeypatch)
    monkeypatch.delenv("CXX", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("VITMODS_NATIVE", "0")
        assert native.library("twice") is None
        monkeypatch.delenv("VITMODS_NATIVE")
        with monkeypatch.context() as patched:
            patched.setattr(build, "COMPILERS", ("no-such-compiler",))
            assert again() is None
    assert calls == []
    assert again() is not None


@pytest.mark.parametrize(
    ("cxx", "message"),
    [
        ("no-such-compiler -O1", r"program no-such-compiler, which CXX names, does not exist"),
        ("'unbalanced", "CXX is not a command"),
    ],
)
def test_a_cxx_that_cannot_be_used_is_reported_once(source, monkeypatch, cxx, message):
    monkeypatch.setenv("CXX", cxx)
    with pytest.warns(UserWarning, match=message) as caught:
        assert [native.library("twice") for _ in range(2)] == [None, None]
    assert len(caught) == 1


@pytest.mark.parametrize("problem", ["compiler", "source", "hang"])
def test_a_build_that_fails_warns_once_with_the_reason(source, tmp_path, monkeypatch, problem):
    broken = tmp_path / "broken"
    reason = {"compiler": "sorry, no license", "source": "expected", "hang": "timed out"}[problem]
    if problem == "source":
        source.write_text(SOURCE + "int x = ;")
    else:
        broken.write_text("#!/bin/sh\n" + ("sleep 9" if problem == "hang" else f"echo {reason} >&2; exit 1"))
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        monkeypatch.setattr(build, "SECONDS", 0.2 if problem == "hang" else 300)
    with pytest.warns(UserWarning, match=f"VITMODS_NATIVE=0(.|\n)*{reason}") as caught:
        assert [native.library("twice") for _ in range(2)] == [None, None]
    assert len(caught) == 1


def test_flags_that_a_compiler_lacks_are_left_out(source, tmp_path, monkeypatch):
    """A compiler with its own OpenMP gives a library that does not load; one that knows no -march stops at once."""
    picky = tmp_path / "picky"
    real = build.find_compiler()[0]
    picky.write_text(f'#!/bin/sh\ncase "$*" in *-march*) echo unknown flag >&2; exit 1;; esac\nexec {real} "$@"\n')
    picky.chmod(0o755)
    monkeypatch.setenv("CXX", str(picky))
    assert native.library("twice").twice(21) == 42
    assert native.library("twice").threads(2) == 1
