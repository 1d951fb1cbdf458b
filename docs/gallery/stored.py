"""The results of a study in one small archive: all that its report is read from, and nothing of this machine.

Weights, checkpoints and logs are left out, and with them the figures of the report that show weights. Paths become
`path/to/NAME`. Arrays are stored plainly, so that the archive as a whole compresses what trials have in common.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from contextlib import chdir
from pathlib import Path, PurePath
from typing import Any

import numpy as np

KEPT = re.compile(
    r"(confirm/[^/]+/)?((study|costs)\.json|(samples|images)\.npz|trials/.+/("
    r"(result|config|val|test|warnings|reused)\.json|metrics\.jsonl|(val|test)\.npz|examples/[^/]+))"
)


def store(run: Path, archive: Path, images: bool = True) -> None:
    """Write the archive of a study; the same study gives the same bytes.

    images: keep the few images of the data set that the report shows; not where they are someone else's
    """
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for path in sorted(run.rglob("*"), key=lambda path: (path.name, path)):  # alike files side by side
            name = path.relative_to(run).as_posix()
            shows_images = path.name == "samples.npz" or "examples" in path.parts
            if not (path.is_file() and KEPT.fullmatch(name) and (images or not shows_images)):
                continue
            if content := _public(path):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))


def _public(path: Path) -> bytes:
    """The content of a file as it is stored; empty if the report does not need it."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            plain = dict(arrays)
        if path.name == "images.npz" and not any(name.startswith("groups_") for name in plain):
            return b""  # every image is its own group
        buffer = io.BytesIO()
        np.savez(buffer, **plain)
        return buffer.getvalue()
    return json.dumps(_values(path)).encode() if path.suffix == ".json" else path.read_bytes()


def _values(path: Path) -> Any:
    from vitmods.util.text import public_command, without_place

    values = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "reused.json":
        return {**values, "study": f"../{PurePath(values['study']).name}"}
    command = values.get("command") if path.name == "study.json" else None
    return without_place(values) | ({"command": public_command(command, leave_out=("--out",))} if command else {})


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack an archive as runs/NAME in a folder, and return that path, relative to the folder."""
    run = Path("runs", archive.name.partition(".")[0])
    with tarfile.open(archive) as packed:
        packed.extractall(folder / run, filter="data")
    return run


def write_page(archive: Path, folder: Path, out: Path) -> None:
    """Write the report of a stored study; `folder` is where it is unpacked, which the report does not name."""
    from vitmods.report import write_report
    from vitmods.study import Answer

    run, out = unpack(archive, folder), out.resolve()
    with chdir(folder):
        write_report(Answer.load(run), out)
