"""Where images come from. A source is one file here, or in a module of the user's, that reads it and carries its facts.

A spec is "NAME:REST?option=value&...", only a name ("digits"), or the path of a folder.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from vitmods.data.records import ALLOWED, Source, Streaming, printable
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user
from vitmods.util.registry import Registry


@dataclass(frozen=True)
class SourceKind:
    """How a source is opened, and its facts.

    usage: the spec, as "imagenet:FOLDER" or "digits". title: a description in one line. options: those that may follow
    the question mark; None: its reader checks them. needs: packages beyond vitmods' own. claims: whether it reads a
    path without a name; an unclaimed path is a folder of class folders. looks_like: whether such a folder may be meant
    for this source, which an error then suggests. parts: the sets that "NAME:*" names, if it has several.

    A published set in a folder also has: layout: the names of its files below the folder, one alternative a line.
    origin: who distributes them. classes; counts: images of each split as published. used_in: tables of the papers.
    terms: stated conditions of use. Its splits are published, so oddities (see ALLOWED) are warnings. arrange: changes
    the splits after the comparison with the published counts.
    """

    name: str
    usage: str
    title: str
    open: "Callable[[Spec], Source]"
    options: tuple[str, ...] | None = ()
    needs: str = ""
    claims: Callable[[Path], bool] | None = None
    looks_like: Callable[[Path], bool] | None = None
    parts: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    origin: str = ""
    classes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    used_in: str = ""
    terms: str = "see its authors"
    notes: tuple[str, ...] = ()
    arrange: "Callable[[Spec, Source], Source] | None" = None

    def __post_init__(self) -> None:
        for name in ("__module__", "__qualname__"):  # by which the registry sees whose it is
            object.__setattr__(self, name, getattr(self.open, name) or "__main__")

    def missing(self, root: Path, reason: str) -> UserError:
        """The error that says which files to put where."""
        where = printable(str(root))
        ways = "\n".join(f"  {where}/{line}" for line in self.layout)
        one_of = "one of these lines" if len(self.layout) > 1 else "this"
        return UserError(
            f"{self.title} was not found in {where}: {reason.rstrip('.')}.\nPut there {one_of}:\n{ways}\n"
            f"The files come from {self.origin}. Nothing is downloaded unless asked for."
        )


SOURCES: Registry[SourceKind] = Registry(
    "data source", "vitmods.data.sources", "vitmods.papers.sources", "vitmods.tasks.*.sources"
)


@dataclass(frozen=True)
class Spec:
    """A parsed spec; rest: the text between the name and the question mark."""

    text: str
    kind: SourceKind
    rest: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        return printable(self.text)

    @property
    def folder(self) -> Path:
        """The folder that the spec names, as "root" or before the question mark."""
        return expand_user(self.options["root"] if "root=" in self.kind.usage else self.rest)

    def streaming(self, word: str = "stream", buffer: int = Streaming.buffer) -> Streaming:
        """The options `stream` (0 or 1; or another word) and `buffer` (images). Raises UserError for other values."""
        asked = {"": None, "0": False, "1": True}.get(self.options.get(word, ""), "?")
        places = self.options.get("buffer", str(buffer))
        if asked == "?" or not places.isdecimal() or int(places) < 1:
            raise UserError(f'"{self}": {word} is 0 or 1, and buffer a number of images, at least 1.')
        return Streaming(asked, int(places))  # type: ignore[arg-type]


def data_source(
    name: str, usage: str, title: str, **facts: Any
) -> Callable[[Callable[[Spec], Source]], Callable[[Spec], Source]]:
    """Register the function that opens a source; facts: fields of SourceKind.

        @data_source("mine", "mine:FOLDER", "our own archive")
        def mine(spec: Spec) -> Source: ...

    One function may open several; `spec.kind` is the one that is meant.
    """

    def register(function: Callable[[Spec], Source]) -> Callable[[Spec], Source]:
        SOURCES.add(name, SourceKind(name, usage, title, function, **facts))
        return function

    return register


def is_same_place(spec: str, other: str) -> bool:
    """Whether two specs or paths, each perhaps with ?options, name one place, as `photos`, `photos/` and `./photos`
    do."""
    if spec in SOURCES or other in SOURCES:  # a name, and not the folder of that name
        return spec == other
    (path, _, options), (other_path, _, other_options) = spec.partition("?"), other.partition("?")
    places = {os.path.realpath(expand_user(each)) for each in (path, other_path)}
    return options == other_options and len(places) == 1


def open_source(spec: str | Path) -> Source:
    """Find a data set. Raises UserError where the spec names nothing that can be opened."""
    text = str(spec)
    if not text.strip():
        raise UserError('No data given. Try "digits", or the path of a folder with one sub-folder per class.')
    bare, allow = _allowance(text)
    parsed = _parse(bare)
    kind = parsed.kind
    if kind.layout and not parsed.folder.is_dir():
        raise kind.missing(parsed.folder, "the folder does not exist")
    with naming_the_source(bare):
        source = kind.open(parsed)
    last = len(source.classes) - 1
    for name, part in source.splits.items() if source.target == "class" else ():
        if len(strange := np.flatnonzero((part.labels < 0) | (part.labels > last))):
            raise UserError(
                f"{len(strange)} images of {name} in {parsed} lack a class, such as {printable(part.ids[strange[0]])} "
                f"with the label {part.labels[strange[0]]} (classes are 0 to {last}). Leave them out."
            )
    if kind.layout:
        counts = {name: len(records) for name, records in source.splits.items()}
        differing = [
            f"{name} has {counts[name]:,} images; {kind.title} as published has {count:,}."
            for name, count in kind.counts.items()
            if counts.get(name, count) != count
        ]
        source = replace(source, warnings=[*source.warnings, *differing], allow=frozenset(ALLOWED))
    source = kind.arrange(parsed, source) if kind.arrange else source
    classes = tuple(map(printable, source.classes))
    return replace(source, spec=text, allow=source.allow | allow, classes=classes)


@contextmanager
def naming_the_source(spec: str | Path) -> Iterator[None]:
    """Let a UserError inside also suggest the source's name, if a folder was given that looks like one of a source."""
    try:
        yield
    except UserError as error:
        text = str(spec)
        root = expand_user(_folder_and_options(text)[0])
        kinds = SOURCES.items() if root.is_dir() else ()
        specs = [f"{name}:{printable(text)}" for name, kind in kinds if kind.looks_like and kind.looks_like(root)]
        if specs:
            raise type(error)(f"{error} It looks like {' or '.join(specs)}: write that.") from error
        raise


def each_set(spec: str) -> list[str]:
    """List the specs that a spec with a star names: all tasks of VTAB for `vtab:*?root=FOLDER`; or the spec."""
    name, star, rest = spec.partition(":*")
    parts = SOURCES[name].parts if star and name in SOURCES else ()
    return [f"{name}:{part}{rest}" for part in parts] or [spec]


def known_specs() -> str:
    """List all specs that may replace a folder, in one line."""
    published = [name for name, kind in SOURCES.items() if kind.layout and "root=" not in kind.usage]
    others = [kind.usage for name, kind in SOURCES.items() if not kind.layout and name != "folder"]
    return f"{', '.join(others)}, or NAME:FOLDER for a known set ({', '.join(published)})"


def _parse(text: str) -> Spec:
    if text in SOURCES and SOURCES[text].usage == text:
        return Spec(text, SOURCES[text], "", {})
    name, colon, path = text.partition(":")
    kind = SOURCES.get(name) if colon else None
    if kind is None or not kind.usage.startswith(f"{name}:"):
        path, options = _folder_and_options(text)
        folder = expand_user(path)
        # By name: a folder that two sources can read is opened as the same one, wherever they are defined.
        ordered = sorted(SOURCES, key=lambda source: (SOURCES.is_from_outside(source), source))
        claims = [SOURCES[source] for source in ordered if (claim := SOURCES[source].claims) and claim(folder)]
        kind = claims[0] if claims else SOURCES["folder"]
        prefixes = [other for other in SOURCES if SOURCES[other].usage.startswith(f"{other}:")]
        if colon and not os.path.exists(text) and (hint := nearest(name, prefixes)).startswith("Did you"):
            raise UserError(f'Neither a folder "{printable(text)}" nor a set called "{name}" exists. {hint}')
    else:
        path, _, query = path.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
    for option in options if kind.options is not None else ():
        if option not in (kind.options or ()) and f"?{option}=" not in kind.usage:
            advice = nearest(option, kind.options) if kind.options else "It takes none."
            raise UserError(f'"{printable(text)}": unknown option "{option}" of {kind.name}. {advice}')
    usage = kind.usage.replace("NAME", path or "NAME")
    if not path or ("?root=" in kind.usage and not options.get("root")):
        raise UserError(f'"{printable(text)}" does not say where the images are: write {usage}.')
    return Spec(text, kind, path, options)


def _folder_and_options(text: str) -> tuple[str, dict[str, str]]:
    """A folder's own name may have a question mark."""
    name, mark, query = text.rpartition("?")
    if not mark or os.path.exists(expand_user(text)):
        return text, {}
    return name, dict(parse_qsl(query, keep_blank_values=True))


def _allowance(spec: str) -> tuple[str, frozenset[str]]:
    """The spec without its options "allow", and their values. A question mark in a folder's name is kept."""
    head, mark, query = spec.rpartition("?")
    options = query.split("&") if mark else []
    allowed = [name for o in options if o.startswith("allow=") for name in o.removeprefix("allow=").split(",")]
    if unknown := [name for name in allowed if name not in ALLOWED]:
        raise UserError(f'"{spec}": unknown value "{unknown[0]}" of allow. {nearest(unknown[0], ALLOWED)}')
    if not allowed:
        return spec, frozenset()
    others = "&".join(option for option in options if not option.startswith("allow="))
    return f"{head}?{others}" if others else head, frozenset(allowed)
