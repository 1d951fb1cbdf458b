"""Folders of this user: caches, which can be recomputed, and data, which cannot."""

import os
import tempfile
from pathlib import Path

from vitmods.util.errors import UserError


def user_cache() -> Path:
    """Return the folder of caches if none is given: $XDG_CACHE_HOME/vitmods (an absolute path, as its specification
    requires) or ~/.cache/vitmods; without a home, as in containers, a folder in the temporary one.

    Raises UserError if that last folder belongs to somebody else.
    """
    return _user_folder("XDG_CACHE_HOME", ".cache")


def user_data() -> Path:
    """Return the folder of what must not be cleared: $XDG_DATA_HOME/vitmods or ~/.local/share/vitmods, otherwise as
    `user_cache`."""
    return _user_folder("XDG_DATA_HOME", ".local/share")


def _user_folder(variable: str, within_home: str) -> Path:
    path = os.environ.get(variable, "")
    if os.path.isabs(path):
        return Path(path) / "vitmods"
    try:
        return Path.home() / within_home / "vitmods"
    except RuntimeError:
        return temporary_cache()


def temporary_cache() -> Path:
    """Return this user's own folder in the temporary one. Raises UserError if others may write to it."""
    folder = Path(tempfile.gettempdir()) / f"vitmods-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"No folder can hold caches ({error}): set XDG_CACHE_HOME to your own folder.") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        raise UserError(f"{folder} can be written by others: remove it, or set XDG_CACHE_HOME to your own folder.")
    return folder
