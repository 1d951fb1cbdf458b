"""Errors that a user can fix. The message says what is wrong and what to do; the shell prints it as one paragraph."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Input, a setting or a file is not usable as given; the message names it and the remedy."""


class NoEffect(UserError):
    """A change was applied that alters nothing on this model."""


class SlotConflict(UserError):
    """Two changes of one arm want to fill the same slot."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the known word closest to a mistyped one, or all of them when none is close."""
    spelled = {name.lower(): name for name in sorted(known)}
    begun = [name for name in spelled if word and name.startswith(word.lower())]
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.5) or (begun if len(begun) == 1 else [])
    return f"Did you mean '{spelled[close[0]]}'?" if close else f"Known: {', '.join(spelled.values())}."
