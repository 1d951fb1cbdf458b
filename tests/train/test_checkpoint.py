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


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_newest_is_loaded_and_the_one_before_is_kept(folder):
    assert checkpoint.load(folder)["step"] == 2
    assert torch.load(folder / OLD, weights_only=True)["step"] == 1


def test_none_if_there_never_was_one(tmp_path):
    assert checkpoint.load(tmp_path) is None


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "empty", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(folder, damage):
    path = folder / NEW
    if damage == "missing":  # killed between two renames
        path.unlink()
        assert checkpoint.load(folder)["step"] == 1
        return
    if damage == "flipped bit":
        flip_a_bit(path)
    else:
        path.write_bytes(path.read_bytes()[: 1000 if damage == "truncated" else 0])
    with pytest.warns(UserWarning, match="damaged"):
        assert checkpoint.load(folder)["step"] == 1


def test_a_damaged_checkpoint_does_not_push_out_the_good_one(folder):
    flip_a_bit(folder / NEW)
    with pytest.warns(UserWarning, match="damaged"):
        checkpoint.load(folder)
    checkpoint.save(folder, {"step": 3})
    assert torch.load(folder / OLD, weights_only=True)["step"] == 1
    assert checkpoint.load(folder)["step"] == 3


def test_all_damaged_is_an_error_that_says_what_to_do(folder):
    flip_a_bit(folder / NEW)
    flip_a_bit(folder / OLD)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError, match="Delete that folder"):
        checkpoint.load(folder)


def test_nothing_but_plain_data_is_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("hello",)

    torch.save({"step": Evil()}, tmp_path / NEW)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(UserError):
        checkpoint.load(tmp_path)


def test_a_finished_trial_keeps_no_checkpoint(folder):
    checkpoint.remove(folder)
    assert list(folder.iterdir()) == []
