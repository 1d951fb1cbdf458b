"""The ledger: which tables of which trials have been shown, so that a new folder does not undo what one folder guards.

A table that was shown is a look. It is a line of a file beside the folders of the studies, one file for each user,
which outlives the folders: what was trained, by hashes, with which seeds, and how it was read. A later table of trials
that are in the ledger is one more look at them: its intervals hold together over all arms that were shown with its
base, at the level of a look at its seeds out of the most that were planned or shown. The same table again is no look.
What no level makes up for (another metric, base or split that was chosen after scores were seen) is a doubt.

The ledger makes verdicts more careful, never less. A line that cannot be read does not count, with a warning, and a
file of another user is not read.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import Any

from vitmods.stats.sequential import next_maximum
from vitmods.study.store import StudyFolder, fits
from vitmods.train.trial import decisive_settings
from vitmods.util.limits import open_file, parse_json
from vitmods.util.text import listing, plural, printable

PLACE = "VITMODS_LEDGER"
"""environment variable: the ledger's folder, from that of a study"""
_SPLIT = ("split_seed", "split_file", "val_fraction", "test_fraction", "fold")
# False claims in %, by the number of others: docs/statistics.md has all of these.
SERIES = ("9 to 10", "13 to 14", "17 to 18", "20 to 21", "23 to 25", "26 to 28", "28 to 31")
RESTARTED = ("9 to 10", "13 to 15", "17 to 19")
METRICS = ("6 to 9", "7 to 13", "8 to 17", "9 to 20")
BASES = ("5", "6", "6 to 8", "7 to 9", "8 to 9", "9 to 10", "9 to 11")


def identities(config: Mapping[str, Any]) -> tuple[str, str]:
    """Hash what a trial's numbers depend on but for its seed, and its images with their split. The first one is
    `kind-cell`: the kind is without split and machine, and knows the images by their place; the cell has all, and
    knows the images by their content. KeyError or TypeError for what is not the config of a trial."""
    settings = decisive_settings(config)
    images, data = dict(settings.pop("images")), dict(settings.pop("data"))
    split = {name: images.pop(name, None) for name in _SPLIT}
    for part, name in ((images, "data"), (data, "name")):
        part.pop(name, None)
    path, mark, of_source = str(config["images"].get("data") or "").partition("?")
    place = f"{os.path.normpath(path)}{mark}{of_source}" if path else None
    machine = {name: settings.pop(name, None) for name in ("environment", "code")}
    settings |= {"images": images, "seed": None}
    kind, tested, cell = (
        sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        for content in ([settings, place], [data, split], [settings, data, split, machine])
    )
    return f"{kind}-{cell}", tested


@dataclass(frozen=True)
class ShownTable:
    """A table of verdicts. Base and arms are known by the hashes of their trials, one for each setting or fold.

    study:      when it was begun, and the name of its folder
    metric:     with its options
    settings:   of a sweep, which verdicts are averages over
    base_seeds: with those that were known
    spare:      whether the number of seeds is not settled yet
    family:     arms that were planned
    images:     hashes of images and split
    time:       of the first reading
    """

    study: str
    metric: str
    margin: float
    generalize: str
    until_decided: bool
    seeds: tuple[int, ...]
    base_seeds: tuple[int, ...]
    spare: bool
    family: int
    images: tuple[str, ...]
    base: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    settings: int = 1
    time: str = ""

    @classmethod
    def from_line(cls, line: str) -> ShownTable:
        """Read a line of the ledger. Raises ValueError or TypeError for anything else."""
        values = parse_json(line)
        if not fits(values, cls):
            raise ValueError("a value is of another type")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**{**values, "arms": {name: tuple(arm) for name, arm in values.get("arms", {}).items()}})

    @property
    def cells(self) -> set[str]:
        return _cells(*self.arms.values())

    def has_arms(self, other: ShownTable) -> bool:
        """Whether it shows all arms of another table, under any names."""
        return not any(self.cells.isdisjoint(_cells(arm)) for arm in other.arms.values())

    def looks_at(self, other: ShownTable) -> bool:
        """Whether it shows a trial of an arm that another table shows."""
        return _share(self.cells, other.cells) and _share(self.seeds, other.seeds)

    def shares_base(self, other: ShownTable) -> bool:
        """Whether both show a trial of base."""
        return _share(_cells(self.base), _cells(other.base)) and _share(self.base_seeds, other.base_seeds)

    def contains(self, other: ShownTable) -> bool:
        """Whether another table is a part of it: of fewer arms, with the same seeds, or before they were settled."""
        begun, other_begun = (table.study.partition(" ")[0] for table in (self, other))
        settled = begun == other_begun and other.spare and set(self.seeds) <= set(other.seeds)
        looks = (self.until_decided, self.seeds, self.base_seeds)
        if not settled and looks != (other.until_decided, other.seeds, other.base_seeds):
            return False
        return other.study == self.study or (self.shares_base(other) and self.has_arms(other))

    def repeats(self, other: ShownTable) -> bool:
        """Whether it is another table again."""
        same = all(
            getattr(self, name) == getattr(other, name)
            for name in ("metric", "margin", "generalize", "settings", "spare")
        )
        return same and self.contains(other) and other.has_arms(self)


@dataclass(frozen=True)
class Earlier:
    """What earlier tables mean for one.

    most:   where it is one more look, the most seeds that were planned or shown, times the root of the number of
            earlier looks, so that the level of a look (`interim_level`) is divided by it; None: it is the first
    family: arms that intervals hold together over
    """

    most: int | None
    family: int
    doubts: tuple[str, ...] = ()


def earlier_looks(table: ShownTable, lines: Sequence[ShownTable]) -> Earlier:
    """Judge a table by the lines that were entered before it was first shown."""
    before = [*takewhile(lambda line: not table.repeats(line), lines)]
    seen = [line for line in before if table.looks_at(line)]
    again = [line for line in seen if not table.contains(line)]
    family, doubts = max([table.family, *(line.family for line in seen)]), (*_doubts(table, before, seen),)
    if not again:
        return Earlier(None, family, doubts)
    of_base = [table, *seen, *filter(table.shares_base, before)]
    family = max(family, len({min(_cells(arm[:1]), default="") for line in of_base for arm in line.arms.values()}))
    settled = {line.study for line in again if not line.spare}
    looks = {(line.study, line.seeds) for line in again if not (line.spare and line.study in settled)}
    shown, count = max(len(line.seeds) for line in again), len(table.seeds)
    most = math.ceil(math.sqrt(len(looks)) * (shown if count <= shown else next_maximum(count)))
    studies = listing([*dict.fromkeys(printable(line.study.partition(" ")[2]) for line in again)])
    doubt = (
        f"Trials of these arms were shown before, with other arms or seeds ({studies}). So that all looks together "
        "claim something false in at most 6 % of such studies, intervals are wider, and hold together over "
        f"{plural(family, 'arm')}. Fresh seeds have the intervals of a first look."
    )
    return Earlier(most, family, (doubt, *doubts))


def _doubts(table: ShownTable, before: Sequence[ShownTable], seen: Sequence[ShownTable]) -> Iterator[str]:
    """What no level makes up for. `seen` are the tables of these trials, `before` all."""
    alike = [line for line in seen if line.metric == table.metric]
    metrics = len({line.metric for line in seen} - {table.metric})
    for what, name, lines, more in (
        ("The margin", "margin", alike, " What it decides ('no worse') holds for a margin chosen before."),
        ("The metric", "metric", seen, _wrong("studies with so many metrics", METRICS, metrics)),
        ("The number of settings", "settings", seen, ""),
        ("What verdicts are about", "generalize", seen, ""),
    ):
        now, was = (getattr(of, name) for of in (table, next(iter(lines), table)))
        if now != was:
            now, was = (f"{value:g}" if isinstance(value, float) else value for value in (now, was))
            yield f"{what} was changed after the scores were seen: it is {now} and was {was}.{more}"
    planned = max((line.family for line in seen), default=len(table.arms))
    if len(table.arms) > planned and all(map(table.contains, seen)):
        yield (
            f"Arms were added after scores were seen: {plural(planned, 'arm')} {'was' if planned == 1 else 'were'} "
            f"planned, and there are {len(table.arms)} now.{_wrong('such studies', ('6 to 11',), 1)} Say how many "
            "there will be at the start (--family)."
        )
    elsewhere = [line for line in before if line.study != table.study]
    arms, restarts = _kinds(*table.arms.values()) | table.cells, list[ShownTable]()
    for line in elsewhere:
        again = arms & (_kinds(*line.arms.values()) | line.cells)
        if again and line not in seen and not any(map(line.shares_base, restarts)):
            restarts.append(line)
    series = {line.study for line in elsewhere if line.arms and table.shares_base(line)}
    if restarts:
        yield (
            "These arms were compared before with other seeds, another split or on another machine."
            f"{_wrong('such series', RESTARTED, len(restarts))}"
        )
    elif series and not seen:
        yield (
            f"Base's trials were shown with other arms in {plural(len(series), 'other study', 'other studies')}."
            f"{_wrong('such series', SERIES, len(series))} One study of all arms has one family."
        )
    rivals = [line for line in elsewhere if _share(table.images, line.images)]
    others = (line.base for line in rivals if not _share(_cells(line.base), _cells(table.base)))
    bases = _kinds(*others) - _kinds(table.base)
    if len(bases) > 1 and any(map(table.shares_base, rivals)):  # the better one of two costs nothing
        yield (
            f"The scores of base were seen before, beside those of {len(bases)} other bases on these images. If the "
            "best of them was taken, its scores are too good, and arms seem to hurt."
            f"{_wrong('such studies', BASES, len(bases))} Fresh seeds of base are right."
        )


def _wrong(what: str, rates: Sequence[str], others: int) -> str:
    """Say how often, with so many others, something false is claimed."""
    rate = f"{rates[min(others, len(rates)) - 1]} %{' or more' * (others > len(rates))}"
    return f" Of {what} {rate} claim something false at one time or another, instead of 5 %."


def _kinds(*arms: Sequence[str]) -> set[str]:
    return {cell.partition("-")[0] for arm in arms for cell in arm}


def _cells(*arms: Sequence[str]) -> set[str]:
    return {cell.partition("-")[2] for arm in arms for cell in arm}


def _share(some: Iterable[object], others: Iterable[object]) -> bool:
    return not set(some).isdisjoint(others)


def ledger_of(folder: Path) -> Path:
    """The ledger of this user for the study in a folder: next to it, and of a stage next to the folder of all stages,
    so that it outlives them. Each kind of stage has its own: a confirmation is no second look at what it confirms."""
    outermost, stage = folder.absolute(), ""
    while holder := _holder(outermost):
        outermost, kind = holder
        stage = stage or kind
    place = folder.absolute() / os.environ[PLACE] if PLACE in os.environ else outermost.parent
    return Path(os.path.normpath(place), f".vitmods-looks-{_user()}{stage and '-'}{stage}.jsonl")


def _holder(folder: Path) -> tuple[Path, str] | None:
    """The folder that a study is a stage of, and the kind of stage; None for others."""
    if confirmed := StudyFolder(folder).confirmed_study:
        return confirmed, "confirm"
    above = folder.parent
    if above == folder:
        return None
    if folder.name == "screen" and (above / "improve.json").is_file():
        return above, "screen"
    return (above, "") if (above / "over_data.json").is_file() else None


def ledgers_of(folder: Path) -> list[Path]:
    """The ledgers to read for the study in a folder: its own, and the one that earlier versions wrote next to it."""
    earlier = [] if PLACE in os.environ else [folder.absolute().parent / f".vitmods-looks-{_user()}.jsonl"]
    return [*dict.fromkeys([ledger_of(folder), *earlier])]


def is_own(path: Path) -> bool:
    """Whether a file or folder, or what a link leads to, exists and belongs to this user."""
    return path.exists() and path.stat().st_uid == _user()


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0


def read_ledgers(paths: Iterable[Path]) -> list[ShownTable]:
    """Read the tables of ledgers, oldest first; a clock that was set back does not change the order in one of them.
    What cannot be read is a warning."""
    tables = []
    for path in paths:
        damaged, time = 0, ""
        for line in filter(None, _lines(path)):
            try:
                table = ShownTable.from_line(line)
            except (TypeError, ValueError):
                damaged += 1
            else:
                time = max(time, table.time)
                tables.append((time, table))
        if damaged:
            _warn(path, f"{plural(damaged, 'line')} cannot be read", "do not count")
    return [table for _, table in sorted(tables, key=lambda entry: entry[0])]


def enter(table: ShownTable, path: Path) -> None:
    """Append a table to a ledger, if it is not there. Where that fails, it is a warning: the table is right."""
    if any(map(table.repeats, read_ledgers([path]))):
        return
    entry = json.dumps(asdict(replace(table, time=datetime.now(UTC).isoformat())))
    torn = [*_lines(path), ""][-2:][0]  # by a run that was killed, or a full disk
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(path, "ab", 0, opener=lambda name, _: os.open(name, flags, 0o644)) as file:
            file.write(f"{chr(10) if torn else ''}{entry}\n".encode())
    except OSError as error:
        _warn(path, f"it cannot be written ({error.strerror})", "are not known to later studies")


def _lines(path: Path) -> list[str]:
    """Read the lines of a ledger; what follows the last newline is the last."""
    try:
        with open_file(path, "text", _user(), links=False) as file:
            return file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _warn(path, f"it cannot be read ({error})", "do not count")
        return []


def _warn(path: Path, what: str, result: str) -> None:
    warnings.warn(
        f"{printable(str(path))}, the ledger of verdicts that were shown: {what}. These looks {result}. Repair or "
        "remove the file, or make its folder writable (docs/verdicts.md).",
        stacklevel=2,
    )
