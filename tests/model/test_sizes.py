"""Images of other sizes: a model that is set to them, or takes them from call to call, by its positions and norms."""

import copy
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import vitmods as vm
from vitmods.adapters.timm import from_timm, to_timm
from vitmods.layers.position import sincos2d
from vitmods.util.errors import UserError


def small(changes="", **overrides):
    torch.manual_seed(0)
    model = vm.vit("mu2/4", img_size=16, num_classes=5, **overrides)
    return vm.apply(model, *vm.parse_changes(changes)) if changes else model


@pytest.mark.parametrize("changes", ["", "dpn", "dpn(before=false,after=false,after_position=true)", "rms+postnorm"])
@pytest.mark.parametrize(
    "overrides", [{}, {"position_on_prefix": False, "reg_tokens": 2}, {"position": "none"}], ids=str
)
def test_another_image_size_keeps_all_weights_but_the_positions(changes, overrides):
    model = small(changes, **overrides)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("centered", [False, True])
def test_fixed_positions_are_exact_in_the_type_of_the_model_and_made_again(dtype, centered):
    model = small(position="sincos2d_centered" if centered else "sincos2d", position_on_prefix=False)
    assert model.pos_embed.dtype == torch.float32
    assert torch.equal(model.to(dtype).pos_embed, sincos2d((4, 4), 32, centered=centered).to(dtype))
    assert torch.equal(vm.apply(model, vm.LayerScale()).pos_embed, model.pos_embed)
    model.set_input_size((8, 24))
    assert torch.equal(model.pos_embed, sincos2d((2, 6), 32, centered=centered).to(dtype))
    assert "pos_embed" not in model.state_dict()


@pytest.mark.parametrize("changes", ["", "dpn", "dpn(norm=rms)", "dpn(norm=only_learnable)", "dpn(norm=no_learnable)"])
def test_another_patch_size_keeps_the_grid_and_resizes_the_stem(changes):
    model = small(changes)
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
    model = small().eval()
    tile = torch.randn(2, 3, 4, 1, 4, 1).expand(-1, -1, -1, 4, -1, 4).reshape(2, 3, 16, 16)  # each patch of one color
    before = model(tile)
    model.set_input_size(32, 8)
    torch.testing.assert_close(model(tile.repeat_interleave(2, 2).repeat_interleave(2, 3)), before, atol=1e-5, rtol=0)


def test_sizes_that_do_not_fit_leave_the_model_as_it_was():
    model = small()
    config = model.vit_config
    for arguments, options, message in (((17,), {}, "16 or 20"), ((32,), {"positions": "bilinaer"}, "'bilinear'")):
        with pytest.raises(UserError, match=message):
            model.set_input_size(*arguments, **options)
        assert model.vit_config == config
        assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 5)


def test_frozen_parameters_stay_frozen():
    model = small("dpn").requires_grad_(False)
    model.set_input_size(32, 4)
    model.set_input_size(32, 8)
    assert not [name for name, p in model.named_parameters() if p.requires_grad]


SIZES = [(32, 32), (16, 48), (48, 16), (64, 32)]


def build(changes="", **fields):
    torch.manual_seed(0)
    model = vm.vit("mu/8", **{"img_size": 32, "depth": 3, "num_classes": 5, "dynamic_img_size": True, **fields})
    model = vm.apply(model, *vm.parse_changes(changes)) if changes else model
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def images_of(size, count=2):
    return torch.randn(count, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(size[0]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"no_embed_class": True, "reg_tokens": 2}, {"global_pool": "avg"}], ids=str)
def test_timms_model_gives_the_same(size, options):
    torch.manual_seed(0)
    reference = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, dynamic_img_size=True, **options
    )
    reference = reference.double().eval()
    images = torch.randn(2, 3, 2 * size[0], 2 * size[1], dtype=torch.float64)
    for actual in (from_timm(reference), from_timm(to_timm(from_timm(reference)))):
        assert actual.vit_config.dynamic_img_size
        torch.testing.assert_close(actual(images), reference(images), atol=1e-6, rtol=1e-6)


CASES = [
    ("", {}),
    ("", {"position": "sincos2d", "position_on_prefix": False}),
    ("", {"position": "none"}),
    ("dtn", {}),
    ("dtn+gpsa", {}),
    ("gpsa", {"pool": "avg"}),
    ("dpn+parallel(branches=3)", {"class_token": False, "pool": "avg"}),
    ("stem(kind=hmlp)", {"patch_size": 16, "img_size": 64}),
]


@pytest.mark.parametrize(("changes", "fields"), CASES, ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_several_sizes_in_one_step_are_as_models_of_each_size(changes, fields, checkpointing):
    """(2, 6) and (6, 2) patches are as many: only the grid tells them apart."""
    model = build(changes, **fields)
    factor = model.vit_config.patch_size[0] // 8
    model.set_grad_checkpointing(checkpointing)
    sizes = [(factor * rows, factor * columns) for rows, columns in SIZES]
    batches = [images_of(size) for size in sizes]
    sum(model(images).square().sum() for images in batches).backward()
    together = {name: parameter.grad for name, parameter in model.named_parameters()}
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for images in batches:
        fixed = copy.deepcopy(alone)
        fixed.set_input_size(images.shape[-2:], dynamic_img_size=False)
        torch.testing.assert_close(model(images), fixed(images), atol=1e-9, rtol=1e-9)
        if model.vit_config.position == "learn":
            continue  # a resampled table is another parameter
        fixed(images).square().sum().backward()
        for form, other in zip(alone.parameters(), fixed.parameters()):
            form.grad = other.grad if form.grad is None else form.grad + other.grad
    if model.vit_config.position != "learn":
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(together[name], parameter.grad, atol=1e-8, rtol=1e-6)
    assert all(grad is not None for grad in together.values())


def test_gradients_reach_learned_positions_through_resampling():
    model = build(depth=1)
    images = images_of((16, 48), 1)
    torch.autograd.gradcheck(
        lambda positions: torch.func.functional_call(model, {"pos_embed": positions}, (images,)),
        model.pos_embed,
        fast_mode=True,
    )


def test_recomputation_knows_the_grid_of_its_call():
    """Two calls of as many patches before one backward: each block runs again on the grid that it ran on."""
    model, plain = build("dtn", position="none"), build("dtn", position="none")
    model.set_grad_checkpointing()
    for form in (model, plain):
        (form(images_of((16, 48))).sum() + form(images_of((48, 16))).square().sum()).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-10, rtol=1e-8)


def test_masks_and_intermediates_of_other_sizes():
    model, images = build(mask_token=True).eval(), images_of((16, 48))
    keep = torch.tensor([[0, 11, 3], [5, 4, 2]])
    tokens = model.forward_features(images, keep=keep)
    assert tokens.shape == (2, 4, 32)
    everything = torch.arange(12).expand(2, -1)
    torch.testing.assert_close(model.forward_features(images, keep=everything), model.forward_features(images))
    assert model(images, mask=torch.ones(2, 12, dtype=torch.bool)).shape == (2, 5)
    assert [t.shape[-2:] for t in model.forward_intermediates(images, intermediates_only=True)] == [(2, 6)] * 3


def test_it_is_asked_for_and_can_be_taken_back():
    model, images = build("dtn", dynamic_img_size=False), images_of((16, 48))
    with pytest.raises(ValueError, match=r"made for 32x32.*dynamic_img_size"):
        model(images)
    model.set_input_size(dynamic_img_size=True)
    assert model.vit_config.dynamic_img_size
    assert model(images).shape == (2, 5)
    model.set_input_size(dynamic_img_size=False)
    assert model(images_of((32, 32))).shape == (2, 5)
    with pytest.raises(ValueError, match="made for 32x32"):
        model(images)
    with pytest.raises(ValueError, match="cannot be cut into patches"):
        build()(images_of((20, 32)))


def test_graphs_and_changes_keep_it():
    model = build().eval()
    graph = torch.fx.symbolic_trace(model)
    for size in SIZES:
        torch.testing.assert_close(graph(images_of(size)), model(images_of(size)))
    with pytest.raises(UserError, match="DynamicTokenNorm reads the grid"):
        torch.fx.symbolic_trace(build("dtn"))
    assert vm.apply(build(), vm.DualPatchNorm()).vit_config.dynamic_img_size
    assert vm.apply(build(), vm.DualPatchNorm())(images_of((16, 48))).shape == (2, 5)
