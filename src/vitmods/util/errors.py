"""Errors that a user can fix. Each message names the problem and the remedy; the shell prints it as one paragraph."""

import difflib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

SAID_IN = "VITMODS_SAID_IN"  # environment: the folder that processes that were started together know


class UserError(ValueError):
    """Input, a setting or a file is not usable as given; the message names it and the remedy."""


class NoEffect(UserError):
    """The change would not alter this model."""


class Refused(UserError):
    """A change cannot be put into a model in place; ``reason`` is one of four."""

    reason: ClassVar[str]


class NeedsReading(Refused):
    """The change, with these settings, needs a vitmods ViT."""

    reason = "needs a model that can be read"


class NotRecognized(Refused):
    """A part that the change refers to is not recognized."""

    reason = "not recognized"


class UnfitStem(Refused):
    """The change needs one projection of patches that do not overlap."""

    reason = "overlapping or layered stem"


class NotCertified(Refused):
    """The changed model does not compute what it must."""

    reason = "not certified"


class SlotConflict(UserError):
    """Two changes of one arm want to fill the same slot."""


@contextmanager
def explaining(message: Callable[[Exception], str], *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, by default of any, into a UserError with this message. A UserError stays as it is."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise UserError(message(error)) from error


def needs(what: str, extra: str) -> AbstractContextManager[None]:
    """Raise UserError, with what to install, if a package that is imported inside is missing."""
    return explaining(lambda error: f"{what} ({error}): pip install 'vitmods[{extra}]'.", ImportError)


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def nearest(word: str, known: Iterable[str], words: Mapping[str, str] | None = None) -> str:
    """A hint naming the known word closest to a mistyped one, or all of them when none is close.

    ``words`` are other words for some of them: word -> known word.
    """
    names = sorted(known)
    spelled = {other.lower(): name for other, name in (words or {}).items()} | {name.lower(): name for name in names}
    word = word.lower()
    close = difflib.get_close_matches(word, spelled, n=5, cutoff=0.5)
    close.sort(key=lambda name: sorted(name) != sorted(word))  # letters that changed places come first
    completions = [name for name in spelled if word and name.startswith(word)]
    matches = close[:1] or (completions if len(completions) == 1 else [])
    return f"Did you mean '{spelled[matches[0]]}'?" if matches else f"Known: {', '.join(names)}."


def unknown(
    kind: str, name: str, known: Iterable[str], words: Mapping[str, str] | None = None, advice: str = ""
) -> UserError:
    """The error for a name that no thing of a kind has, with the nearest one; `advice` ends it."""
    return UserError(f"Unknown {kind} '{name}'. {nearest(name, known, words)} {advice}".rstrip())


def said(message: str, repeats: bool = False) -> bool:
    """Whether another process of the same launch on this machine has printed this message; with `repeats`, whether one
    has printed anything, or `vitmods.train.launch` will. False for processes that were not started together."""
    place = os.environ.get(SAID_IN)
    if place is not None and repeats:
        return True
    if place is None and (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):  # torchrun: <attempt>/<rank>/...
        place = str(Path(error_file).parent.parent)
    if place is None:
        return False
    digest = hashlib.blake2b(message.encode(), digest_size=8).hexdigest()
    try:
        if repeats and any(Path(place).glob("said-*")):
            return True
        open(Path(place) / f"said-{digest}", "x").close()
    except FileExistsError:
        return True
    except OSError:
        return False
    return False
