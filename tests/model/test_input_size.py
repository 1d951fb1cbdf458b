from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import vitmods as vm
from vitmods.layers.position import sincos2d
from vitmods.util.errors import UserError


def build(changes="", **overrides):
    torch.manual_seed(0)
    model = vm.vit("mu2/4", img_size=16, num_classes=5, **overrides)
    return vm.apply(model, *vm.parse_changes(changes)) if changes else model


@pytest.mark.parametrize("changes", ["", "dpn", "dpn(before=false,after=false,after_position=true)", "rms+postnorm"])
@pytest.mark.parametrize(
    "overrides", [{}, {"position_on_prefix": False, "reg_tokens": 2}, {"position": "none"}], ids=str
)
def test_another_image_size_keeps_all_weights_but_the_positions(changes, overrides):
    model = build(changes, **overrides)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.set_input_size((24, 32))
    assert model.vit_config.img_size == (24, 32)
    assert model(torch.randn(2, 3, 24, 32)).shape == (2, 5)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert {name for name in after if not torch.equal(before[name], after[name])} <= {"pos_embed"}
    fresh = vm.vit(model.vit_config)
    fresh.load_state_dict(after)  # the config still describes the model


def test_positions_are_resampled_with_aligned_corners_as_big_vision_does():
    golden = np.load(Path(__file__).parents[1] / "golden" / "bv_resample_posemb.npz")
    model = vm.vit("mu1/4", img_size=28, embed_dim=6, num_heads=2, position_on_prefix=False).double()
    with torch.no_grad():
        model.pos_embed.copy_(torch.from_numpy(golden["in.old"]))
    model.set_input_size(48, positions="bilinear")
    torch.testing.assert_close(model.pos_embed.detach(), torch.from_numpy(golden["out.new12"]), atol=1e-10, rtol=0)


def test_positions_are_resampled_as_timm_does():
    reference = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    actual = vm.vit("Ti1/16", img_size=64)
    actual.load_state_dict(reference.state_dict())
    for model in (actual, reference):
        model.set_input_size((96, 80))
    torch.testing.assert_close(actual.pos_embed, reference.pos_embed)


@pytest.mark.parametrize("centered", [False, True])
def test_fixed_positions_are_made_again(centered):
    model = build(position="sincos2d_centered" if centered else "sincos2d", position_on_prefix=False).double()
    model.set_input_size((8, 24))
    assert torch.equal(model.pos_embed, sincos2d((2, 6), 32, centered=centered))
    assert "pos_embed" not in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fixed_positions_are_exact_in_the_type_of_the_model(dtype):
    model = build(position="sincos2d", position_on_prefix=False)
    assert model.pos_embed.dtype == torch.float32
    table = sincos2d(model.vit_config.grid, model.vit_config.embed_dim)
    assert torch.equal(model.to(dtype).pos_embed, table.to(dtype))
    new = vm.apply(model, vm.LayerScale())
    assert torch.equal(new.pos_embed, table.to(dtype))


@pytest.mark.parametrize("changes", ["", "dpn", "dpn(norm=rms)", "dpn(norm=only_learnable)", "dpn(norm=no_learnable)"])
def test_another_patch_size_keeps_the_grid_and_resizes_the_stem(changes):
    model = build(changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.set_input_size(32, 8)
    assert model.vit_config.patch_size == (8, 8)
    images = torch.randn(2, 3, 32, 32)
    model(images).square().sum().backward()
    with torch.no_grad():
        assert model.eval()(images).isfinite().all()
    after = model.state_dict()
    changed = {
        name for name in after if before[name].shape != after[name].shape or not torch.equal(before[name], after[name])
    }
    assert changed <= {"patch_embed.proj.weight", "patch_embed.norm_before.weight", "patch_embed.norm_before.bias"}
    fresh = vm.vit(model.vit_config)
    fresh.load_state_dict(after)
    torch.testing.assert_close(fresh.eval()(images), model(images))


def test_a_smooth_image_enlarged_with_its_patches_keeps_its_logits():
    """Patch and image sizes doubled together: FlexiViT's kernel reads the same tokens from the enlarged patches."""
    model = build().eval()
    tile = torch.randn(2, 3, 4, 1, 4, 1).expand(-1, -1, -1, 4, -1, 4).reshape(2, 3, 16, 16)  # each patch of one color
    before = model(tile)
    model.set_input_size(32, 8)
    torch.testing.assert_close(model(tile.repeat_interleave(2, 2).repeat_interleave(2, 3)), before, atol=1e-5, rtol=0)


def test_sizes_that_do_not_fit_leave_the_model_as_it_was():
    model = build()
    config = model.vit_config
    with pytest.raises(UserError, match="16 or 20"):
        model.set_input_size(17)
    assert model.vit_config == config
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 5)
    model = build()
    with pytest.raises(UserError, match="Did you mean 'bilinear'"):
        model.set_input_size(32, positions="bilinaer")
    assert model.vit_config.img_size == (16, 16)


def test_frozen_parameters_stay_frozen():
    model = build("dpn").requires_grad_(False)
    model.set_input_size(32, 4)
    model.set_input_size(32, 8)
    assert not [name for name, p in model.named_parameters() if p.requires_grad]
