"""Images of other sizes than the model's own, from call to call: positions and norms follow, gradients are right."""

import copy

import pytest
import timm
import torch

import vitmods as vm
from vitmods.adapters.timm import from_timm, to_timm
from vitmods.util.errors import UserError

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
