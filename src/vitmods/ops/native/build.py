"""From a C++ file to a loaded library: find a compiler, build, keep, load.

A library is kept under a hash of all that decides it and a hash of itself. It is written under another name and renamed
when complete: of several processes that build the same, each gets a whole one, and a damaged one is built again.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from ctypes import CDLL
from hashlib import sha256
from pathlib import Path

from vitmods.util.cache import user_cache

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
ALWAYS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# Tried in turn. OpenMP is compiled in and not linked: its functions are those of the OpenMP that torch has loaded, so
# there is one pool of threads. A compiler whose OpenMP is another one builds for one thread.
FLAGS = (("-march=native", "-fopenmp"), ("-march=native", "-fopenmp-simd"), ())
SHARED = ("-shared", *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()))
SECONDS = 120  # for one run of the compiler


class BuildError(Exception):
    """No set of flags gave a library that loads; the message is the compiler's or the loader's."""


def load(name: str) -> CDLL | None:
    """``NAME.cpp`` of this folder as a library, from the cache or built now; None without a compiler.

    None with a warning if $CXX names no program, or if the build fails.
    """
    try:
        compiler = find_compiler()
        return None if compiler is None else build(SOURCES / f"{name}.cpp", compiler)
    except BuildError as error:
        warnings.warn(
            f"The native form of {name} could not be built; the slower Python form is used. Set CXX to another C++ "
            f"compiler, or VITMODS_NATIVE=0 to leave native forms out. The reason: {error}",
            stacklevel=3,
        )
        return None


def find_compiler() -> list[str] | None:
    """The command of $CXX, or of the first compiler on the path. Raises BuildError if $CXX is no program."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise BuildError(f"there is no program {given[0]}, which CXX names.")
        return given
    return next(([found] for found in map(shutil.which, COMPILERS) if found), None)


def build(source: Path, compiler: list[str]) -> CDLL:
    """Load the library of this source and compiler, made if it is not in the cache. Raises BuildError."""
    decides = [source.read_bytes(), repr((compiler, ALWAYS, FLAGS, SHARED)).encode()]
    decides += [_run([*compiler, "--version"]), _processor()]
    stem, folder = f"{source.stem}-{_digest(*decides)}", _folder()
    if (kept := _kept(folder, stem)) is not None:
        return kept
    with tempfile.TemporaryDirectory(prefix="vitmods-") as name:
        made, library = _compile(source, compiler, Path(name))
        _keep(made.read_bytes(), folder, stem)
        return library  # which stays mapped when its file is gone


def _digest(*parts: bytes) -> str:
    return sha256(b"\0".join(parts)).hexdigest()[:16]


def _folder() -> Path | None:
    try:
        return user_cache() / "native"
    except RuntimeError:  # a user without a home
        return None


def _kept(folder: Path | None, stem: str) -> CDLL | None:
    """A cached library that is whole and loads; damaged ones of its name are removed."""
    for path in [] if folder is None else sorted(folder.glob(f"{stem}-*.so")):
        try:
            if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return CDLL(str(path))
            path.unlink()
        except OSError:
            continue
    return None


def _keep(content: bytes, folder: Path | None, stem: str) -> None:
    """Add a library to the cache; a folder that cannot be written to is no reason to do without the library."""
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
            path = Path(name) / "library"
            path.write_bytes(content)
            os.replace(path, folder / f"{stem}-{_digest(content)}.so")


def _compile(source: Path, compiler: list[str], folder: Path) -> tuple[Path, CDLL]:
    """Build with the first flags that give a library that loads here."""
    problems: list[Exception] = []
    for i, flags in enumerate(FLAGS):
        unit, made = folder / f"{i}.o", folder / f"{i}.so"
        try:
            _run([*compiler, *ALWAYS, *flags, "-c", str(source), "-o", str(unit)])
            _run([*compiler, *SHARED, str(unit), "-o", str(made)])
            return made, CDLL(str(made))
        except (BuildError, OSError) as error:
            problems.append(error)
    raise BuildError(str(problems[0]))


def _run(command: list[str]) -> bytes:
    """Output of a command. Raises BuildError with what it wrote if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise BuildError(f"{shlex.join(command)} ended with {done.returncode}: {said[-2000:]}")
    return done.stdout


def _processor() -> bytes:
    """What -march=native depends on: a cache may be shared by machines."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return described.encode()
    features = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([described, *sorted(features)]).encode()
