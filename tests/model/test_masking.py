"""Only visible patches (keep) and mask tokens in place (mask), for masked pre-training."""

import pytest
import torch

import vitmods as vm
from vitmods.model.slots import NormConfig
from vitmods.util.errors import UserError

KEEP = torch.tensor([[3, 0, 4], [5, 1, 2]])
MASK = torch.tensor([[True, False, False, True, False, False], [False] * 6])
MODELS = [
    {},
    {"pool": "avg", "reg_tokens": 2},
    {"pool": "map", "class_token": False, "position": "sincos2d"},
    {"position_on_prefix": False, "position": "sincos2d", "prefix_from": 1},
    {"position": "none", "position_norm": NormConfig()},
]


def make(changes="", **overrides):
    torch.manual_seed(0)
    config = vm.ViTConfig.from_name("mu2/4", **{"img_size": (8, 12), "num_classes": 5, "mask_token": True, **overrides})
    if config.position == "sincos2d":
        config = config.with_(position_on_prefix=False)
    model = vm.ViT(vm.apply(vm.vit(config), *vm.parse_changes(changes)).vit_config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def random_images(seed=0):
    return torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def embedded(model, x, **which):
    """The tokens that the first block reads."""
    seen = []
    hook = model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.forward_features(x, **which)
    hook.remove()
    return seen[0]


def same(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("overrides", MODELS, ids=str)
def test_visible_tokens_keep_their_positions_and_hidden_patches_reach_nothing(overrides):
    model, images, other = make(**overrides), random_images(), random_images()
    all_tokens, visible = embedded(model, images), embedded(model, images, keep=KEEP)
    prefix = 0 if model.vit_config.prefix_from else model.vit_config.num_prefix_tokens
    assert visible.shape[1] == prefix + 3
    same(visible[:, :prefix], all_tokens[:, :prefix])
    same(visible[:, prefix:], all_tokens[:, prefix:].gather(1, KEEP[..., None].expand(-1, -1, 32)))
    hidden = torch.ones(2, 6, dtype=torch.bool).scatter(1, KEEP, False).view(2, 1, 2, 3)
    other[hidden.repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(other)] = 7
    same(model(images, keep=KEEP), model(other, keep=KEEP))
    assert (model(images) - model(other)).abs().amax() > 1e-3
    assert model.forward_features(images, keep=KEEP).shape == (2, model.vit_config.num_prefix_tokens + 3, 32)


@pytest.mark.parametrize("changes", ["", "hmlp", "local", "dpn", "norm(kind=batch)", "placement(attn=post,mlp=post)"])
def test_all_patches_in_their_order_are_no_keep_at_all(changes):
    model = make(changes)
    everything = torch.arange(6).expand(2, 6)
    same(model(random_images(), keep=everything), model(random_images()))
    same(model.forward_features(random_images(), keep=everything), model.forward_features(random_images()))


@pytest.mark.parametrize("overrides", MODELS, ids=str)
def test_the_mask_token_stands_where_the_mask_is_true(overrides):
    """In place of the stem's token, before the positions are added."""
    model = make(**overrides)
    tokens = model.patch_embed(random_images())
    tokens[0, [0, 3]] = model.mask_token[0, 0]
    model.patch_embed.register_forward_hook(lambda m, args, out: tokens)
    expected = model(random_images())
    model.patch_embed._forward_hooks.clear()
    same(model(random_images(), mask=MASK), expected)
    same(model(random_images(), mask=torch.zeros_like(MASK)), model(random_images()))
    same(model.forward_features(random_images(), mask=torch.ones_like(MASK)),
         model.forward_features(random_images(1), mask=torch.ones_like(MASK)))  # fmt: skip


def test_training_reaches_every_parameter():
    model = make("hmlp-ln", patch_size=4).train()
    model.set_grad_checkpointing()
    model(random_images(), mask=MASK).sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    model.zero_grad()
    model(random_images(), keep=KEEP).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["mask_token"]


def test_the_mask_token_is_spared_from_decay_and_starts_small():
    model = vm.vit("S/16", mask_token=True)
    assert "mask_token" in model.no_weight_decay()
    assert float(model.mask_token.std()) == pytest.approx(0.02, rel=0.2)
    assert "mask_token" not in dict(vm.vit("mu/2").named_parameters())
    assert "patch_embed.position" in make("local").no_weight_decay()


IN_ATTENTION = ["relpos", "relpos(shared=true)", "rope", "rope(frequencies=mixed)"]


@pytest.mark.parametrize("prefix", [{}, {"class_token": False, "pool": "avg"}, {"reg_tokens": 2}], ids=str)
@pytest.mark.parametrize("changes", ["", "valueresidual", *IN_ATTENTION])
def test_visible_tokens_are_as_if_nobody_looked_at_the_others(changes, prefix):
    model, images, count = make(changes, **prefix).train(), random_images(), 6
    first = model.vit_config.num_prefix_tokens
    hidden = torch.ones(2, first + count, dtype=torch.bool)
    hidden[:, :first] = False
    hidden[:, first:].scatter_(1, KEEP, False)
    whole = model.forward_features(images, attn_mask=~hidden[:, None, None])
    chosen = torch.cat([torch.arange(first).expand(2, -1), KEEP + first], dim=1)
    expected = whole.gather(1, chosen[..., None].expand(-1, -1, 32))
    visible = model.forward_features(images, keep=KEEP)
    same(visible, expected)
    model.set_grad_checkpointing()
    inputs = [p for name, p in model.named_parameters() if not name.startswith(("mask_token", "head"))]
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), inputs)
    again = torch.autograd.grad((model.forward_features(images, keep=KEEP) * weights).sum(), inputs)
    for one, other in zip(gradients, again, strict=True):
        same(one, other)
    same(model.forward_features(images, attn_mask=~hidden[:, None, None]), whole)  # nothing is left of keep


@pytest.mark.parametrize(
    ("changes", "which"),
    [("", {"keep": KEEP}), ("", {"mask": MASK}), *((changes, {"keep": KEEP}) for changes in IN_ATTENTION)],
    ids=["keep", "mask", *IN_ATTENTION],
)
def test_it_compiles_and_exports(changes, which):
    model, images = make("+".join(filter(None, ["hmlp-ln", changes])), depth=1).float(), random_images().float()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    same(compiled(images, **which), model(images, **which), atol=1e-5)
    torch._dynamo.reset()
    with torch.no_grad():
        program = torch.export.export(model, (images,), which)
        same(program.module()(images, **which), model(images, **which), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "which", "message"),
    [
        ("", {"keep": torch.tensor([[0, 0], [1, 2]])}, "repeats a patch of image 0"),
        ("", {"keep": torch.tensor([[0], [6]])}, r"names the patches \[6\]"),
        ("levit", {"keep": KEEP}, "overlapping windows"),
        ("dtn", {"keep": KEEP}, "DynamicTokenNorm reads the whole grid.*use mask"),
        ("gpsa(blocks=1)", {"keep": KEEP}, "GatedPositions reads the whole grid.*use mask"),
        ("", {"mask": MASK.long()}, r"boolean and \(2, 6\) here, not torch.int64 \(2, 6\)"),
        ("", {"mask": MASK[:, :5]}, r"not torch.bool \(2, 5\)"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error(changes, which, message):
    with pytest.raises(UserError, match=message):
        make(changes)(random_images(), **which)
    with pytest.raises(UserError, match="mask_token=True"):
        make(mask_token=False)(random_images(), mask=MASK)


@pytest.mark.parametrize("changes", ["", "dpn", "hmlp-ln", "local", "dtn"])
def test_the_stem_may_leave_masked_patches_out(changes):
    model, images = make(changes), random_images()
    mask = torch.tensor([[True, False, True, True, True, False], [False, True, True, True, True, True]])
    keep = torch.tensor([[5, 1], [0, 3]])
    same(model(images, keep=keep, mask=mask), model(images, mask=mask))
    mask[1, 2] = False  # a patch in neither gets the mask token too
    same(
        model(images, keep=keep, mask=mask),
        model(images, keep=keep, mask=mask.logical_or(mask.new_tensor([0, 0, 1, 0, 0, 0]))),
    )


def test_other_sizes_norms_and_types():
    assert make("dtn")(random_images(), mask=MASK).shape == (2, 5)
    model = make()
    model.set_input_size((12, 12))
    same(model(torch.ones(1, 3, 12, 12).double(), keep=torch.arange(9)[None]), model(torch.ones(1, 3, 12, 12).double()))
    model = make().float()
    with torch.autocast("cpu", torch.bfloat16):
        for which in ({"keep": KEEP}, {"mask": MASK}):
            assert model(random_images().float(), **which).dtype == torch.bfloat16
