"""Images that belong together: of one patient, of one video, or equal byte for byte. A split that is made keeps them in
one part.

A rule says by what: "folder", or "folder:2" for its path down to the second level; "name:REGEX", what the expression
finds in the path (or its first group finds); "file:groups.csv", lines of path and group. Paths are those that
`vitmods data` shows, below the folder of the set.
"""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

import numpy as np

from vitmods.data.boxes import Ints
from vitmods.data.records import Records, printable
from vitmods.util.errors import UserError, nearest
from vitmods.util.files import expand_user

RULES = ("folder", "name", "file")


def keys_by(rule: str, ids: Sequence[str]) -> tuple[str, ...]:
    """The group of each image by the rule. Raises UserError where it cannot be understood or leaves images out."""
    kind, _, rest = rule.partition(":")
    if kind not in RULES or (kind != "folder" and not rest):
        raise UserError(
            f'groups is "folder", "folder:2", "name:REGEX" or "file:groups.csv", not "{printable(rule)}". '
            f"{nearest(kind, RULES)}"
        )
    find = {"folder": _by_folder, "name": _by_name, "file": _by_file}[kind](rest)
    keys = [find(name) for name in ids]
    if without := [name for name, key in zip(ids, keys, strict=True) if key is None]:
        raise UserError(
            f'By groups="{printable(rule)}" {len(without)} of {len(ids)} images belong to no group, such as '
            f"{printable(without[0])}. Change the rule so that it finds one for each."
        )
    return tuple(str(key) for key in keys)


def _by_folder(level: str) -> Callable[[str], str | None]:
    if level and not (level.isdecimal() and int(level) > 0):
        raise UserError(f'The level of groups="folder:{printable(level)}" is a whole number from 1 on.')

    def find(name: str) -> str | None:
        parts = PurePosixPath(name).parts[:-1]
        return "/".join(parts[: int(level or len(parts))]) if len(parts) >= int(level or 1) else None

    return find


def _by_name(pattern: str) -> Callable[[str], str | None]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f'groups="name:{printable(pattern)}" is no regular expression: {error}.') from error

    def find(name: str) -> str | None:
        found = expression.search(name)
        return found[min(1, expression.groups)] if found else None

    return find


def _by_file(path: str) -> Callable[[str], str | None]:
    try:
        rows = list(csv.reader(expand_user(path).read_text("utf-8").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f'groups="file:{printable(path)}" cannot be read: {error}.') from error
    if strange := [number for number, row in enumerate(rows, 1) if row and len(row) != 2]:
        raise UserError(f"Line {strange[0]} of {printable(path)} is not an image's path and its group.")
    return {row[0].strip(): row[1].strip() for row in rows if row}.get


def groups_of(records: Records, rule: str | None, digests: Mapping[str, bytes]) -> Ints | None:
    """A number (n,) for each image, alike where equal groups or equal bytes join two, if by others; None: all differ.

    digests: of the images' bytes by name, where they are known.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(records)
    columns = [[digests.get(name) or name for name in records.ids], *([keys_by(rule, records.ids)] if rule else [])]
    node: dict[tuple[int, str | bytes], int] = {}
    ends = [node.setdefault((i, key), n + len(node)) for i, column in enumerate(columns) for key in column]
    if len(node) == len(ends):
        return None
    starts, size = np.tile(np.arange(n), len(columns)), n + len(node)
    joined = coo_array((np.ones(len(ends), dtype=bool), (starts, ends)), shape=(size, size))
    found: Ints = connected_components(joined, directed=False)[1][:n].astype(np.int64)
    return found
