"""Which images a study is of: hashes of all in images.npz, with their groups; split.csv, where it is damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitmods.data.groups import read_columns
from vitmods.data.split_file import SPLIT_FILE
from vitmods.util import limits
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import write_atomically

if TYPE_CHECKING:
    from vitmods.data.dataset import Split


class StudyImages:
    """The images of the study, or of the single trial, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / "images.npz"

    def write(self, splits: Mapping[str, Split]) -> None:
        """Hashes of the name and of the content of every image, so that a later run can say which have changed; and
        which images belong together."""
        names, contents = _hashes(splits)
        grouped = any(split.groups is not None for split in splits.values())
        groups = {f"groups_{name}": split.groups or split.ids for name, split in splits.items() if grouped}
        arrays = {"names": names, "contents": contents, **{name: np.array(own) for name, own in groups.items()}}
        write_atomically(self._file, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]

    def read(self) -> dict[str, NDArray[Any]] | None:
        """What `write` wrote; None where it is missing or damaged."""
        try:
            found = limits.read_npz(self._file)
            return found if {"names", "contents"} <= set(found) else None
        except Exception:  # whatever numpy, zipfile and zlib raise: what it says is elsewhere too, less handy
            return None

    def groups(self, counts: Mapping[str, int]) -> NDArray[Any] | None:
        """(n,) of the images of these splits, one after the other; None: each stands for itself.

        counts: split -> number of its images. UserError where both files that know it are damaged.
        """
        known = self.read()
        if known is None:
            return self._groups_listed(counts)
        found = [known[name] for split in counts if (name := f"groups_{split}") in known]
        return np.concatenate(found) if len(found) == len(counts) else None

    def _groups_listed(self, counts: Mapping[str, int]) -> NDArray[Any] | None:
        """The same by split.csv; None where there is neither file."""
        path = self._folder / SPLIT_FILE
        if not path.exists() and not self._file.exists():
            return None
        try:
            listed = read_columns(path, ("image", "split", "group"))
            rows = [row for split in counts for row in listed if row["split"] == split]
            if len(rows) != sum(counts.values()):
                raise UserError(f"{named(path)} does not have all images.")
        except UserError as error:
            raise UserError(
                f"{named(self._file)} is damaged, and {SPLIT_FILE} cannot take its place: {error} Run "
                "the same command again, which writes both."
            ) from error
        alone = all(row["group"] == row["image"] for row in rows)
        return None if alone else np.array([row["group"] for row in rows])

    def check_same(self, splits: Mapping[str, Split]) -> None:
        """UserError with how many images were added, removed and changed since `write`, if any; also a label
        that changed is a change, and what moved to another split was removed there and added here."""
        known = self.read()
        if known is None:  # without it the fingerprint alone tells, as one of the settings
            return
        before, then = known["names"], known["contents"]
        names, contents = _hashes(splits)
        _, old, new = np.intersect1d(before, names, return_indices=True)
        changed = int((then[old] != contents[new]).sum())
        counts = {"added": len(names) - len(new), "removed": len(before) - len(old), "changed": changed}
        if any(counts.values()):
            found = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            raise UserError(
                f"{named(self._folder)} is of other images: since it began {found}. Put the old ones back to go on "
                "with it, or choose another folder with --out."
            )

    def same_contents(self, splits: Mapping[str, Split]) -> bool:
        """Whether these are the images and labels of `write`, in any splits; also where that is not known."""
        known = self.read()
        return known is None or np.array_equal(np.sort(known["contents"]), np.sort(_hashes(splits)[1]))


def _hashes(splits: Mapping[str, Split]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(n,) of the names with their split, and of the contents with their labels."""
    texts = (f"{name}/{one}".encode() for name, split in splits.items() for one in split.ids)
    names = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    labels = np.concatenate([split.labels for split in splits.values()]).astype(np.uint64)
    digests = np.concatenate([split.store.index.digests[:, :8] for split in splits.values()])
    contents = np.ascontiguousarray(digests).view(np.uint64).ravel()
    return np.frombuffer(names, dtype=np.uint64), contents + labels * np.uint64(0x9E3779B97F4A7C15)
