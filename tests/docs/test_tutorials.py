"""Each tutorial runs as it is written, in one folder with a few drawn photos; only training is made small."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitmods.cli import main

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r"^```(console|python)\n(.*?)^```$", re.M | re.S)
SMALL = shlex.split("--base mu2/8 --img-size 32 --epochs 1 --batch-size 16 --workers 1 --cost-seconds 0 --device cpu")
ENDS_WITH = {"photos": "verdict.svg", "table": "table.svg", "texts": "texts.svg"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes: light discs on dark ground, and dark on light."""
    folder = tmp_path_factory.mktemp("tutorials") / "photos"
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:40, :40]
    for name, sign in (("maple", 1), ("oak", -1)):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            center, radius = rng.uniform(10, 30, 2), rng.uniform(5, 12)
            disc = np.hypot(y - center[0], x - center[1]) < radius
            image = 128 + sign * 60 * np.where(disc, 1, -1)[..., None] + rng.normal(0, 20, (40, 40, 3))
            Image.fromarray(image.clip(0, 255).astype("uint8")).save(folder / name / f"IMG_{i:04}.png")
    return folder


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_ends_with_an_answer(page, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    names = {"__name__": "a_page"}
    text = page.read_text()
    for kind, block in FENCE.findall(text):
        if kind == "python":
            exec(compile(block, page.name, "exec"), names)
        for line in re.findall(r"^\$ vitmods (.+)$", block, re.M) if kind == "console" else ():
            words = shlex.split(line)
            small = SMALL if words[0] == "compare" or words[:2] == ["paper", "run"] else []
            if "--from" in words:  # which sets the base
                small = small[2:]
            if words[0] == "compare" and "--budget" in words:  # which chooses neither base nor seeds here
                small = [*small, *shlex.split("--seeds 4 --out runs/photos")]
            assert main([*words, *small]) == 0, line
    output = capsys.readouterr().out
    assert re.search(r"\b(helps|hurts|open|no worse|no gain|equivalent)\b", output)
    if made := ENDS_WITH.get(page.stem):
        assert (tmp_path / made).read_text().startswith("<svg"), f"{made} is what the reader looks at"
    else:
        assert names["found"]["tuned" if page.stem == "pretraining" else "dpn"].n == 3
    links = text.partition("## Next steps\n")[2]
    assert links.count("](../") >= 3
