"""check: what `vitmods data` shows."""

import json

from PIL import Image
from rich.cells import cell_len

from vitmods import data


def test_digits_are_fit_and_what_the_test_images_resolve_is_said_before_training(make_folder, tmp_path):
    checked = data.check("digits")
    assert checked.fit
    assert checked.summary["splits"]["train"]["count"] == 1259
    assert json.loads(json.dumps(checked.summary)) == checked.summary
    assert checked.text.splitlines()[0] == "digits: 10 classes; splits made, seed 0"
    assert "all     1259  179   359" in checked.text
    assert "most common 8 x 8 (1797)" in checked.text
    assert (
        "538 test images resolve about ±2.9 points with 4 arms and 5 seeds: ±2.2 to ±3.9 in studies of small ViTs so "
        "far, in which two trainings disagree on 10 to 30 % of the images. The margin of 0.5 points needs about "
        "18,000 test images, or more seeds." in checked.text
    )
    root = make_folder({"test/cat": 6, "test/dog": 6, "train/cat": 6, "train/dog": 6})
    groups = tmp_path / "groups.csv"
    names = [path for path in root.rglob("*.*") if path.is_file()]
    rows = [f"{path.relative_to(root)},{path.parent}{i // 2}" for i, path in enumerate(sorted(names))]
    groups.write_text("\n".join(["image,group", *rows]))
    assert "6 groups of test images resolve about ±" in data.check(root, group_by=groups).text


def test_check_tells_problems_instead_of_raising(make_folder):
    root = make_folder({"cat <b>": 9}, size=(7, 5))
    (root / "cat <b>" / "bad.jpg").write_bytes(b"x")
    checked = data.check(root, val_fraction=0.2)
    assert not checked.fit
    assert checked.summary["problems"] == [
        'All images have one class, "cat <b>": comparing needs two or more, a folder for each.'
    ]
    assert "Problem: All images have one class" in checked.text
    assert "1 image cannot be used:\n  cat <b>/bad.jpg: not an image" in checked.text
    assert "Warning: 1 images that cannot be used" in checked.text


def test_names_with_control_characters_and_wide_letters_stay_in_their_cell(tmp_path):
    names = ["a\x1b[31mred", "b\nline", "猫猫", "right\u202eleft", "plain"]
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        for i in range(10):
            Image.new("RGB", (8, 8), (i, 0, names.index(name))).save(folder / f"\x1b[{i}m.png")
    (tmp_path / "plain" / "bad\n.png").write_bytes(b"no image")
    text = data.check(str(tmp_path)).text
    assert all(letter.isprintable() for line in text.split("\n") for letter in line)
    assert "bad\\n.png: not an image" in text
    rows = [
        line for line in text.splitlines() if line.startswith(("a\\x1b[31mred", "b\\nline", "猫猫", "right", "plain"))
    ]
    assert len(rows) == 5
    assert len({cell_len(row) for row in rows}) == 1
