"""Where what can be made again is kept between runs."""

import os
import tempfile
from pathlib import Path

from vitmods.util.errors import UserError


def user_cache() -> Path:
    """Where caches go if no folder is given: $XDG_CACHE_HOME/vitmods (where that is a whole path, as its specification
    says) or ~/.cache/vitmods; for a user without a home, as in containers, a folder of their own in the temporary one.

    Raises UserError where that last folder belongs to somebody else.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "vitmods"
    try:
        return Path.home() / ".cache" / "vitmods"
    except RuntimeError:
        return temporary_cache()


def temporary_cache() -> Path:
    """A folder of this user's own in the temporary one. Raises UserError where others may write to it."""
    folder = Path(tempfile.gettempdir()) / f"vitmods-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"There is no place for caches ({error}): set XDG_CACHE_HOME to a folder of yours.") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        raise UserError(f"{folder} can be written by others: remove it, or set XDG_CACHE_HOME to a folder of yours.")
    return folder
