"""What can be set of the protocols."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of the protocols; the defaults are those of the papers."""
