"""Dual PatchNorm and the rows of its Table 6 against Flax, in float64, as parameters of one change."""

import pytest
import torch

import vitmods as vm

VARIANTS = {
    "base": None,
    "dpn": vm.DualPatchNorm(),
    "pre": vm.DualPatchNorm(after=False),
    "post": vm.DualPatchNorm(before=False),
    "post_posemb": vm.DualPatchNorm(before=False, after=False, after_position=True),
    "onlylearn": vm.DualPatchNorm(norm="only_learnable"),
    "rmsnorm": vm.DualPatchNorm(norm="rms"),
    "nolearn": vm.DualPatchNorm(norm="no_learnable"),
}


@pytest.fixture
def model_of(golden, flax_stem_weights):
    g = golden("dpn_stem_variants")

    def make(variant, **overrides):
        shape = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 10, "depth": 1, "mlp_dim": 10, "num_heads": 1}
        shape["num_classes"] = 2
        model = vm.vit(vm.ViTConfig(**shape, position_on_prefix=False, **overrides)).double()
        change = VARIANTS[variant]
        model = vm.apply(model, change) if change else model
        dual = vm.DualPatchNorm().edit(vm.ViTConfig(**shape))
        stem = flax_stem_weights(g.group("param"), dual)
        state = model.patch_embed.state_dict()
        model.patch_embed.load_state_dict({name: value for name, value in stem.items() if name in state})
        if variant == "post_posemb":  # the golden reuses LN1's arrays there
            model.norm_pre.load_state_dict({name: stem[f"norm.{name}"] for name in ("weight", "bias")})
        model.pos_embed.data.copy_(g["in.pos_embedding"])
        return g, model

    return make


def embed(model, images):
    """The tokens that the first block reads."""
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.forward_features(images)
    return seen[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_stem_equals_flax(model_of, variant):
    g, model = model_of(variant, class_token=False, pool="avg")
    images = g["in.image_nhwc"].permute(0, 3, 1, 2).clone().requires_grad_()
    tokens = embed(model, images)
    torch.testing.assert_close(tokens, g[f"out.{variant}"], atol=1e-9, rtol=0)
    (tokens * g[f"ct.{variant}"]).sum().backward()
    reference = g[f"grad_in.image.{variant}"].permute(0, 3, 1, 2)
    torch.testing.assert_close(images.grad, reference, atol=1e-9, rtol=0)
    with torch.no_grad():  # another way to the same tokens
        torch.testing.assert_close(embed(model.eval(), images), g[f"out.{variant}"], atol=1e-9, rtol=0)


def test_class_token_passes_the_norm_after_positions_only_on_request(model_of):
    g, model = model_of("post_posemb")
    images = g["in.image_nhwc"].permute(0, 3, 1, 2)
    model.cls_token.data.normal_()
    left_out = embed(model, images)
    torch.testing.assert_close(left_out[:, :1], model.cls_token.expand(2, -1, -1), atol=0, rtol=0)
    torch.testing.assert_close(left_out[:, 1:], g["out.post_posemb"], atol=1e-9, rtol=0)

    change = vm.DualPatchNorm(before=False, after=False, after_position=True, class_token=True)
    included = vm.apply(vm.vit(model.vit_config.with_(position_norm=None)).double(), change)
    included.load_state_dict(model.state_dict())
    normed = included.norm_pre(included.cls_token).expand(2, -1, -1)
    torch.testing.assert_close(embed(included, images), torch.cat([normed, g["out.post_posemb"]], 1), atol=1e-9, rtol=0)
