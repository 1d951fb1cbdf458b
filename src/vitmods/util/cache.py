"""Where what can be made again is kept between runs."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Where caches go if no folder is given: $XDG_CACHE_HOME/vitmods or ~/.cache/vitmods."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitmods"
