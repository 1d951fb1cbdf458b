"""The tutorials as they run: their commands and Python blocks on a few drawn photos, and what these print.

The site shows the output below each block. It is made when the site is built, and kept in build/tutorials for as long
as neither the page nor the package changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "tutorials"
FENCE = re.compile(r"^```(console|python)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# (\w+\.py)\n")  # the first line of a block that is a file, not run
SMALL = "--base mu2/8 --img-size 32 --epochs 4 --batch-size 16 --workers 1 --cost-seconds 0 --device cpu"
MOST_LINES = 40
NOTE = f"""```{{note}}
The outputs on this page are real: every block was run for this site, on 80 drawn images of two classes. So that this
takes seconds, studies were also given `{SMALL}` (other tasks one epoch): their scores mean nothing.
```
"""


def draw_photos(folder: Path) -> None:
    """Write two classes of images: light discs on dark ground, and dark on light."""
    from PIL import Image

    rng = np.random.default_rng(0)
    y, x = np.mgrid[:40, :40]
    for name, sign in (("maple", 1), ("oak", -1)):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            center, radius = rng.uniform(10, 30, 2), rng.uniform(5, 12)
            disc = np.hypot(y - center[0], x - center[1]) < radius
            image = 128 + sign * 60 * np.where(disc, 1, -1)[..., None] + rng.normal(0, 20, (40, 40, 3))
            Image.fromarray(image.clip(0, 255).astype("uint8")).save(folder / name / f"IMG_{i:04}.png")


def make_weights(folder: Path) -> None:
    """Write a small new Dinov2 model as Hugging Face does, in place of the trained one of the tutorial."""
    import torch
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)


def small(words: list[str]) -> list[str]:
    """A command of a tutorial as it is run: studies are made small."""
    if words[0] != "compare" and words[:2] != ["paper", "run"]:
        return words
    chosen = ["--seeds", "4", "--out", "runs/photos"] if words[0] == "compare" and "--budget" in words else []
    options = shlex.split(SMALL)
    if "--task" in words:  # whose steps take longer
        options[options.index("--epochs") + 1] = "1"
    if "--from" in words:  # which sets the base
        options = options[2:]
    return [*words, *options, *chosen]


def run(page: str, name: str = "page") -> Iterator[tuple[str, str]]:
    """Run the blocks of a page in the current folder, where photos are; yields (kind, output) of each.

    Raises RuntimeError if a command fails.
    """
    names: dict[str, Any] = {"__name__": "a_page"}
    for kind, block in FENCE.findall(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if kind == "python" and (file := FILE.match(block)):
                Path(file[1]).write_text(block[file.end() :], encoding="utf-8")
            elif kind == "python":
                exec(compile(block, name, "exec"), names)
            for line in re.findall(r"^\$ vitmods (.+)$", block, re.M) if kind == "console" else ():
                _command(line)
        yield kind, printed.getvalue()


def _command(line: str) -> None:
    words = small(shlex.split(line))
    if "--plugin" in words:  # what it adds stays in a process of its own
        ran = subprocess.run([sys.executable, "-m", "vitmods", *words], capture_output=True, encoding="utf-8")
        print(ran.stdout, ran.stderr, sep="")
        code = ran.returncode
    else:
        from vitmods.cli import main

        code = main(words)
    if code:
        raise RuntimeError(f"vitmods {line} ended with {code}.")


def outputs(path: Path) -> list[str]:
    """What the blocks of a page print, without the folders of this machine."""
    from vitmods.util.text import without_places

    kept = KEPT / f"{path.stem}-{fingerprint(path, Path(__file__))}.json"
    if kept.exists():
        return list(json.loads(kept.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        draw_photos(Path("photos"))
        if "--from dinov2-small" in (text := path.read_text(encoding="utf-8")):
            make_weights(Path("dinov2-small"))
        before = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = "88"
        try:
            printed = [text.replace(folder, "") for _, text in run(text, path.name)]
        finally:
            os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    shown = ["\n".join(map(str.rstrip, without_places(text).rstrip().splitlines())) for text in printed]
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{path.stem}-*.json"):
        old.unlink()
    kept.write_text(json.dumps(shown), encoding="utf-8")
    return shown


def fingerprint(*files: Path) -> str:
    """Of these files and the package."""
    digest = hashlib.blake2b(digest_size=8)
    package = [path for path in sorted((ROOT / "src").rglob("*.*")) if "__pycache__" not in path.parts]
    for file in [*files, *filter(Path.is_file, package)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def with_output(path: Path, text: str) -> str:
    """The page with what each block prints below it, and a note on how it was run."""
    printed = iter(outputs(path))

    def shown(block: re.Match[str]) -> str:
        lines = next(printed).splitlines()
        left_out = len(lines) - MOST_LINES
        if left_out > 0:
            lines = [*lines[: MOST_LINES // 2], f"... {left_out} lines ...", *lines[-MOST_LINES // 2 :]]
        output = "\n".join(lines)
        return f"{block[0]}\n\n````{{code-block}} text\n:class: output\n\n{output}\n````" if output else block[0]

    title, _, rest = FENCE.sub(shown, text).partition("\n\n")
    return f"{title}\n\n{NOTE}\n{rest}"
