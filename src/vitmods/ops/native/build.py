"""Build C++ files to libraries, cache them, and load them.

A library is kept under a hash of all that decides it and a hash of itself. It is written under another name and renamed
when complete: of several processes that build the same, each gets a whole one, and a damaged one is built again. One
that somebody else made, or may write to, is never loaded.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from ctypes import CDLL
from hashlib import sha256
from pathlib import Path

from vitmods.util.cache import temporary_cache, user_cache
from vitmods.util.errors import UserError

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

    None with a warning if $CXX does not name a program, or if the build fails.
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
    """The command of $CXX, or of the first compiler on the path. Raises BuildError if $CXX is not a program."""
    try:
        command = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX is not a command ({error}): {os.environ['CXX']}") from error
    if command:
        if shutil.which(command[0]) is None:
            raise BuildError(f"the program {command[0]}, which CXX names, does not exist.")
        return command
    return next(([path] for path in map(shutil.which, COMPILERS) if path), None)


def build(source: Path, compiler: list[str]) -> CDLL:
    """Load the library of this source and compiler, made if it is not in the cache. Raises BuildError."""
    decides = [source.read_bytes(), repr((compiler, ALWAYS, FLAGS, SHARED)).encode()]
    decides += [_run([*compiler, "--version"]), _processor()]
    stem = f"{source.stem}-{_digest(*decides)}"
    for folder in _folders():
        if (kept := _kept(folder, stem)) is not None:
            return kept
        loads = not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)  # libraries, from this file system
        if loads and os.access(folder, os.W_OK | os.X_OK):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
                made, library = _compile(source, compiler, Path(name))
                with suppress(OSError):
                    made.chmod(0o600)
                    made.replace(folder / f"{stem}-{_digest(made.read_bytes())}.so")
                return library  # which stays mapped under any name, or none
    raise BuildError("a folder to keep it in and load it from is missing. Set XDG_CACHE_HOME to one.")


def _digest(*parts: bytes) -> str:
    return sha256(b"\0".join(parts)).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Return the folders for libraries, the preferred one first: the user's cache, then a temporary one."""
    for cache in (user_cache, temporary_cache):
        try:
            folder = cache() / "native"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and not _is_own(folder):
                folder.chmod(0o700)
            is_own = _is_own(folder)
        except (UserError, OSError):
            continue
        if is_own:
            yield folder


def _is_own(path: Path) -> bool:
    """Whether only this user and root can have written it."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _kept(folder: Path, stem: str) -> CDLL | None:
    """A cached library that is whole, this user's own and loads; damaged ones of its name are removed."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            if not _is_own(path):
                continue
            if path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return CDLL(str(path))
            path.unlink()
        except OSError:
            continue
    return None


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
        output = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise BuildError(f"{shlex.join(command)} ended with {done.returncode}: {output[-2000:]}")
    return done.stdout


def _processor() -> bytes:
    """Describe what -march=native depends on: a cache may be shared by machines."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return described.encode()
    features = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([described, *sorted(features)]).encode()
