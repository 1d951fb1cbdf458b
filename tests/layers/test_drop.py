import pytest
import torch

from vitmods.layers import DropPath, LayerScale


def test_drop_path_drops_whole_images_and_rescales_the_others():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    y = drop(torch.ones(4000, 3, 2))
    per_image = y.flatten(1)
    assert (per_image == per_image[:, :1]).all()
    assert per_image[:, 0].unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert float(per_image.mean()) == pytest.approx(1, abs=0.04)  # 4 standard errors


def test_drop_path_is_the_identity_in_evaluation_and_at_rate_0():
    x = torch.randn(5, 2)
    assert DropPath(0.9).eval()(x) is x
    assert DropPath(0.0)(x) is x


def test_drop_path_keeps_half_types():
    assert DropPath(0.5)(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_layer_scale():
    scale = LayerScale(3, 0.5)
    assert (scale.gamma == 0.5).all()
    scale.gamma.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(scale(torch.ones(2, 3)), torch.tensor([[1.0, 2.0, 3.0]] * 2))
    scale.reset_parameters()
    assert (scale.gamma == 0.5).all()
