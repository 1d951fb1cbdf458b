"""Atomic writing of files, disk errors with a remedy, and output streams that survive the loss of their reader."""

import difflib
import errno
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from vitmods.util.errors import UserError
from vitmods.util.limits import read_json
from vitmods.util.text import printable

if TYPE_CHECKING:
    from rich.console import Console


T = TypeVar("T")
_RESUME = "run the same command again to resume"
_FORBIDDEN = "it may not be written; choose another folder or change its permissions"
_REMEDIES = {
    errno.ENOSPC: f"the disk is full; free some space and {_RESUME}",
    errno.EDQUOT: f"the disk quota is used up; free some space and {_RESUME}",
    errno.EFBIG: f"a file may not grow further here; raise the limit and {_RESUME}",
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.ENOENT: "the folder does not exist or cannot be made; choose another one",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another folder",
    errno.EEXIST: "there is a file of that name where a folder is needed; choose another folder",
    errno.EISDIR: "there is a folder of that name where a file is needed; choose another name",
    errno.ELOOP: "a link on the way points to itself; choose another folder",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter folder",
    errno.EIO: "the disk reports an input/output error; check it",
    errno.ESTALE: f"the network disk has lost the file; {_RESUME}",
}


def expand_user(path: str | Path) -> Path:
    """Replace ~ and ~user in a path. Raises UserError for an unknown home or an impossible file name."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"The home folder of {path} is unknown: write the path without ~, or set HOME.") from None
    try:
        os.stat(expanded)
    except ValueError:  # a zero byte, or half of a surrogate pair
        raise UserError(f"No file can be called {printable(str(path))[:60]}: correct the name.") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(f"The name {printable(str(path))[:60]}... is too long for this system.") from None
    return expanded


def similar_folder(path: Path) -> str:
    """Suggest the existing place with the most similar name to one that does not exist; empty if none is similar."""
    wrong = path
    while wrong.parent != wrong and not wrong.parent.is_dir():
        wrong = wrong.parent
    if path.exists() or not wrong.parent.is_dir():
        return ""
    names = [other.name for other in wrong.parent.iterdir() if other.is_dir() or wrong.suffix]
    close = difflib.get_close_matches(wrong.name, names, n=1)
    if not close:
        return ""
    corrected = wrong.with_name(close[0])
    inside = corrected / path.relative_to(wrong)
    return f"Did you mean {printable(str(inside if inside.exists() else corrected))}?"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk error, also one that a library has wrapped, into a UserError about `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause.errno is None:
            raise
        raise UserError(f"Cannot write {path}: {remedy(cause)}.") from error


def remedy(error: OSError) -> str:
    """Return what an error of the disk means and what to do."""
    return _REMEDIES.get(error.errno or 0) or f"{error.strerror}; check the disk and {_RESUME}"


def make_folder(path: Path) -> Path:
    """Make `path` with its parents; UserError if that cannot be, or if nothing can be written in it."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any], keep_previous: Path | None = None) -> None:
    """Write a file so that a reader, or a restart after a crash, sees the old one or the new one and never a part.

    `write` gets the open file. With `keep_previous` the old file is kept under that name.

    Raises:
        UserError: the disk is full or may not be written; the old file is as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep_previous is not None and path.exists():
                os.replace(path, keep_previous)
            os.replace(temporary, path)
            if os.name == "posix":  # make the renames survive a power cut; only POSIX can open a folder
                descriptor = os.open(path.parent, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused, since JSON has neither."""
    content = json_bytes(value)
    write_atomically(path, lambda file: file.write(content))


def json_bytes(value: Any) -> bytes:
    """Return the content of a file that `write_json` writes."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def checksum(path: Path) -> str:
    """Hash the content of a file to 128 bits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def check_weights(path: Path) -> None:
    """Raise UserError if a file of weights differs from the checksum in its result.json; without one it passes."""
    try:
        recorded = read_json(path.with_name("result.json"))["weights"].get(path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    if recorded is not None and checksum(path) != recorded:
        raise UserError(
            f"{path} is damaged: it is not what was written when its training ended. Copy it again from where it was "
            "trained, or delete its folder and train again."
        )


def check_weights_kept(folder: Path) -> None:
    """Raise UserError if a trial has ended and its weights were removed."""
    try:
        ended = read_json(folder / "result.json")["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if ended and not (folder / "model.safetensors").exists():
        raise UserError(
            f"The weights of {folder} are not there: its study was run with --keep-weights best or none, or took its "
            "scores from another one (reused.json names it), or they were left behind when the folder was copied. Name "
            "a trial of the arm that has model.safetensors, or train again in another folder with --keep-weights all."
        )


class LenientStream:
    """A text stream whose reader may leave (`| head -1`, a dying `tee` or ssh): from then on nothing is written.

    Any other error of the disk is dropped too where `needed` is false, and a UserError otherwise.
    """

    def __init__(self, stream: TextIO | None, needed: bool = False) -> None:
        """stream: None where the process was started without one."""
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        self._needed = needed

    def write(self, text: str) -> int:
        try:
            self._attempt(lambda: self._stream.write(text))
        except UnicodeEncodeError:  # a terminal of ASCII
            encoding = self._stream.encoding
            known = text.encode(encoding, "backslashreplace").decode(encoding)
            self._attempt(lambda: self._stream.write(known))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            with suppress(OSError, ValueError):  # what is still in the buffer would fail again when the process ends
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if self._needed and error.errno not in (errno.EPIPE, errno.EIO):
                raise UserError(f"Cannot write the output: {error.strerror}.") from error


def log(line: str) -> None:
    """Print text to stderr without the control characters of names in it, whether or not anybody reads it."""
    print("\n".join(map(printable, line.split("\n"))), file=LenientStream(sys.stderr), flush=True)


@contextmanager
def lenient_output() -> Iterator[None]:
    """While inside, work continues if nobody reads the output."""
    with (
        redirect_stdout(LenientStream(sys.stdout, needed=True)),
        redirect_stderr(LenientStream(sys.stderr)),
    ):
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(UserError):
                    stream.flush()


def progress_console() -> "Console":
    """rich's console for bars on stderr, which never stops the work."""
    from rich.console import Console

    return Console(file=LenientStream(sys.stderr))  # type: ignore[arg-type]


def tracked(steps: Iterable[T], total: int, what: str) -> Iterable[T]:
    """Yield `total` steps, with a bar on stderr if that is a terminal."""
    from rich.progress import track

    console = progress_console()
    return track(steps, what, total=total, console=console, transient=True, disable=not console.is_terminal)


def rendered(renderable: Any, width: int) -> str:
    """Render a rich table or the like as text without colors."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(renderable, crop=False)
    return "\n".join(map(str.rstrip, captured.get().splitlines()))
