"""check: what `vitmods data` shows."""

import json

from vitmods import data


def test_digits_are_fit() -> None:
    checked = data.check("digits")
    assert checked.fit
    assert checked.summary["splits"]["train"]["count"] == 1439
    assert json.loads(json.dumps(checked.summary)) == checked.summary
    assert checked.text.splitlines()[0] == "digits: 10 classes; splits made, seed 0"
    assert "all     1439  179   179" in checked.text
    assert "most common 8 x 8 (1797)" in checked.text


def test_check_tells_problems_instead_of_raising(make_folder) -> None:
    root = make_folder({"cat <b>": 9}, size=(7, 5))
    (root / "cat <b>" / "bad.jpg").write_bytes(b"x")
    checked = data.check(root, val_fraction=0.2)
    assert not checked.fit
    assert checked.summary["problems"] == [
        'There is one class only, "cat <b>": comparing needs at least two, each in a folder of its own.'
    ]
    assert "Problem: There is one class only" in checked.text
    assert "1 image cannot be read:\n  cat <b>/bad.jpg: not an image" in checked.text
    assert "Warning: 1 images that cannot be read" in checked.text


def test_check_agrees_with_load(make_folder) -> None:
    from vitmods.recipes import plain

    root = make_folder({"cat": 20, "dog": 10})
    loaded = data.load(root, img_size=8, augment=plain(), split_seed=3).summary()
    checked = data.check(root, split_seed=3).summary
    assert {key: checked[key] for key in loaded} == loaded
