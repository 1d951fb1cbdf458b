import pytest
import timm.layers
import torch
from torch.nn import functional as F

from vitmods.layers.position import resample, sincos2d


def test_bicubic_resampling_equals_timms():
    positions = torch.randn(1, 2 + 12, 5)
    theirs = timm.layers.resample_abs_pos_embed(positions, (6, 5), old_size=(3, 4), num_prefix_tokens=2)
    torch.testing.assert_close(resample(positions, (3, 4), (6, 5), prefix=2), theirs, atol=1e-6, rtol=0)


def test_aligned_resampling_keeps_the_corners():
    positions = torch.randn(1, 12, 5, dtype=torch.float64)
    new = resample(positions, (3, 4), (7, 9), aligned=True).view(7, 9, 5)
    old = positions.view(3, 4, 5)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        torch.testing.assert_close(new[corner], old[corner])


@pytest.mark.parametrize("aligned", [False, True])
def test_prefix_entries_and_type_are_kept(aligned):
    positions = torch.randn(1, 3 + 4, 5).bfloat16()
    new = resample(positions, (2, 2), (4, 4), prefix=3, aligned=aligned)
    assert new.shape == (1, 3 + 16, 5)
    assert new.dtype == torch.bfloat16
    assert torch.equal(new[:, :3], positions[:, :3])
    assert resample(positions, (2, 2), (2, 2), prefix=3) is positions


def test_sincos2d_of_a_rectangle_is_row_major_with_the_column_first():
    table = sincos2d((2, 3), 8).view(2, 3, 8)
    omega = torch.tensor([1.0, 1e-4], dtype=torch.float64)
    for row in range(2):
        for column in range(3):
            x, y = column * omega, row * omega
            torch.testing.assert_close(table[row, column], torch.cat([x.sin(), x.cos(), y.sin(), y.cos()]))


def test_centred_sincos2d_is_sincos2d_without_each_positions_mean():
    table, centered = sincos2d((3, 5), 192), sincos2d((3, 5), 192, centered=True)
    assert table.mean(-1).abs().min() > 0.1
    torch.testing.assert_close(centered, table - table.mean(-1, keepdim=True))


def test_sincos2d_of_the_narrowest_width_is_finite():
    assert sincos2d((2, 2), 4).isfinite().all()
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos2d((2, 2), 6)


def test_resampling_is_differentiable_in_its_values():
    positions = torch.randn(1, 4, 2, requires_grad=True)
    F.mse_loss(resample(positions, (2, 2), (3, 3)), torch.zeros(1, 9, 2)).backward()
    assert positions.grad.abs().min() > 0
