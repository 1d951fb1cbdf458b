import errno
from unittest.mock import Mock

import pytest
import torch

from vitmods.train import checkpoint
from vitmods.util.errors import UserError

NEW, OLD = checkpoint.NAME, checkpoint.PREVIOUS


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, {"step": step, "weights": torch.full((1000,), float(step))})
    return tmp_path


def test_the_newest_is_loaded_and_the_one_before_is_kept_until_the_trial_has_finished(folder):
    assert checkpoint.load(folder)["step"] == 2
    assert torch.load(folder / OLD, weights_only=True)["step"] == 1
    checkpoint.remove(folder)
    assert list(folder.iterdir()) == []
    assert checkpoint.load(folder) is None


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "empty", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder, damage):
    path = folder / NEW
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":  # killed between two renames
        path.unlink()
        assert checkpoint.load(folder)["step"] == 1
        return
    path.write_bytes({"flipped bit": content, "truncated": content[:1000], "empty": b""}[damage])
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpoint.load(folder)["step"] == 1
    checkpoint.save(folder, {"step": 3})  # does not push out the good one
    assert torch.load(folder / OLD, weights_only=True)["step"] == 1
    assert checkpoint.load(folder)["step"] == 3


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "many"), OSError(errno.EACCES, "no")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(folder, monkeypatch, error):
    monkeypatch.setattr(checkpoint, "_read", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"checkpoint\.pt cannot be read now .* try again"):
        checkpoint.load(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([NEW, OLD])


def test_all_damaged_is_an_error_that_says_what_to_do(folder):
    """Anything but plain data is damage too, and is not loaded."""

    class Evil:
        def __reduce__(self):
            return pytest.fail, ("it was run",)

    torch.save({"step": Evil()}, folder / NEW)
    (folder / OLD).write_bytes(b"PK")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError, match="Delete that folder"):
        checkpoint.load(folder)
