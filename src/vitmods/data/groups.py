"""Images that belong together: of one patient, of one video, or equal byte for byte. A split that is made keeps them in
one part, and statistics count them as one.

`group_by` says by what: a regular expression, whose first group (or whole match) in an image's path names its group; or
a CSV file with the columns image and group. Paths are those that `vitmods data` shows, below the folder of the set.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitmods.data.records import printable
from vitmods.util.errors import UserError
from vitmods.util.files import expand_user
from vitmods.util.limits import open_table, table

SUGGESTED = (
    r"([^/]+)[-_.](?:frame|tile|crop|f)?[-_]?\d+\.[^./]+$",
    r"(?i)(?<![a-z0-9])((?:patient|subject|case|person|pat|subj|pid|p|video|vid|clip|scene|slide)[-_]?\d+)(?![a-z0-9])",
    r"^([^/]+/.+)/[^/]+$",
)
"""What often names a group: the name before a frame's number, a patient's or a video's number, a folder in a class."""


def keys_by(group_by: str | Path, ids: Sequence[str]) -> tuple[str, ...]:
    """The group of each image. UserError where `group_by` cannot be understood or leaves images out."""
    if str(group_by).lower().endswith(".csv"):
        rows = read_columns(group_by, ("image", "group"))
        known = {row["image"]: row["group"] for row in rows}
        keys = [known.get(name) or known.get(cell(name)) for name in ids]
    else:
        try:
            expression = re.compile(str(group_by))
        except re.error as error:
            raise UserError(f'group_by="{printable(str(group_by))}" is no regular expression: {error}.') from error
        found = map(expression.search, ids)
        keys = [one[min(1, expression.groups)] if one else None for one in found]
    if without := [name for name, key in zip(ids, keys, strict=True) if not key]:
        raise UserError(
            f'By group_by="{printable(str(group_by))}" {len(without)} of {len(ids)} images belong to no group, such as '
            f"{printable(without[0])}. Give an expression that finds one in each path, or a CSV file with the columns "
            "image and group that names each."
        )
    return tuple(map(str, keys))


def groups_of(ids: Sequence[str], group_by: str | Path | None, digests: NDArray[np.uint8]) -> tuple[str, ...] | None:
    """The group of each image, by name; None where each is alone.

    Equal groups and equal bytes join two images, if by others. A group is called as `group_by` calls that of its first
    image by name; without it, as that image. digests (n, 16): of the images' bytes, 0 where they are not known.
    """
    if not (n := len(ids)):
        return None
    keys = keys_by(group_by, ids) if group_by else None
    known = np.flatnonzero(digests.any(axis=1))
    kinds, same = np.unique(hashes(digests[known]), return_inverse=True)
    if keys is None and len(kinds) == len(known):
        return None
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    starts, ends = [known], [n + same]
    if keys is not None:
        starts, ends = [*starts, np.arange(n)], [*ends, 2 * n + np.unique(keys, return_inverse=True)[1]]
    edges = (np.concatenate(starts), np.concatenate(ends))
    joined = coo_array((np.ones(len(edges[0]), dtype=bool), edges), shape=(3 * n, 3 * n))
    component = connected_components(joined, directed=False)[1][:n].tolist()
    if len(set(component)) == n:
        return None
    names: dict[int, str] = {}
    for i in sorted(range(n), key=ids.__getitem__):
        names.setdefault(component[i], ids[i] if keys is None else keys[i])
    return tuple(names[one] for one in component)


def hashes(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return digests (n, 16) as an array (n,) that numpy can sort and compare."""
    return np.ascontiguousarray(digests).view("S16").ravel()


def suggested(ids: Sequence[str], classes: int) -> tuple[str, int] | None:
    """An expression by which names look as if images belonged together, and how many groups it finds; None: none does.

    It finds a group for every image; there are several for each class; most images share theirs with one of the same
    folder, and no group has more than a fifth of them.
    """
    for pattern in SUGGESTED:
        # A lazy iterator: most patterns fail at the first of a million names.
        matches = list(takewhile(bool, map(re.compile(pattern).search, ids)))
        if len(matches) < len(ids):
            continue
        keys = [match[1] for match in matches if match]
        sizes = Counter(keys)
        together = Counter((name.rpartition("/")[0], key) for name, key in zip(ids, keys, strict=True))
        shared = sum(size for size in together.values() if size > 1)
        if len(sizes) >= max(6, 2 * classes) and 2 * shared > len(ids) and 5 * max(sizes.values()) <= len(ids):
            return pattern, len(sizes)
    return None


def read_columns(path: str | Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a CSV file that has these columns, and maybe others. UserError where it has not, or is none."""
    shown = printable(str(path))
    try:
        with open_table(expand_user(path), errors="surrogateescape") as file:
            reader = table(file, restval="", strict=True)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            if missing := [name for name in columns if name not in reader.fieldnames]:
                raise UserError(
                    f"{shown} has no column {' and no column '.join(missing)}: its first line is "
                    f'"{printable(",".join(reader.fieldnames))}".'
                )
            rows = []
            for row in reader:
                if None in row:
                    raise UserError(f"Line {reader.line_num} of {shown} has more columns than its first line.")
                rows.append(row)
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{shown} cannot be read as a CSV file: {error}.") from error
    names = Counter(row.get("image", "") for row in rows)
    if twice := [name for name, count in names.items() if count > 1 and "image" in columns]:
        raise UserError(f"{shown} names {printable(twice[0])} {names[twice[0]]} times: leave one.")
    return rows


def cell(text: str) -> str:
    """Text for a table, with an apostrophe in front where a spreadsheet would run it."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
