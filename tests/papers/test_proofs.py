"""What the papers state and no training is needed for: the proofs of claims that no other test has."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers import DynamicTokenNorm, HMLPStem, LayerNorm, LeViTStem, StemSize
from vitmods.layers.norms import InstanceNorm, RMSNorm, ScaleNorm
from vitmods.model.flops import count_macs, count_params

from .support import close


def fresh(name, **overrides):
    """A model in float64 whose parameters are noise."""
    torch.manual_seed(0)
    model = vm.vit(name, img_size=16, num_classes=5, **overrides).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def blocks_of(**overrides):
    """Parameters of a model's blocks, and its multiply-adds without stem and head."""
    config = vm.ViTConfig.from_name("B/16", num_classes=1, **overrides)
    with torch.device("meta"):
        parameters = count_params(vm.ViT(config).blocks)
    stem_and_head = 196 * 768 * config.embed_dim + config.embed_dim
    return parameters, count_macs(config) - stem_and_head


def test_costs_are_proportional_to_the_depth_and_quadratic_in_the_width():
    """Nearly quadratic: norms and biases have C values, and attention 2 N^2 C multiply-adds."""
    base = blocks_of()
    assert blocks_of(depth=24) == (2 * base[0], 2 * base[1])
    wider = blocks_of(embed_dim=1536, mlp_dim=6144, num_heads=24)
    for few, many in zip(base, wider, strict=True):
        assert many / few == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize("name", ["S/16", "B/16", "L/16"])
def test_attention_has_a_third_of_the_weights_and_the_mlps_twice_as_many(name):
    with torch.device("meta"):
        model = vm.vit(name)
    attention, mlps = (sum(count_params(getattr(block, part)) for block in model.blocks) for part in ("attn", "mlp"))
    assert attention / count_params(model) == pytest.approx(1 / 3, abs=0.013)
    assert mlps / attention == pytest.approx(2, abs=0.005)


def test_parallel_branches_are_the_sequential_ones_where_a_branch_does_not_see_the_other():
    """r'(x + r(x)) = r'(x), here of branches that are constant; not otherwise."""
    model, images = fresh("mu4/4"), tokens(2, 3, 16, 16)
    assert (vm.apply(model, vm.Parallel())(images) - model(images)).abs().max() > 1e-3
    for block in model.blocks:
        block.attn.proj.weight.data.zero_()
        block.mlp.fc2.weight.data.zero_()
    close(vm.apply(model, vm.Parallel())(images), model(images))


def test_hmlp_is_linear_layers_on_each_patch_alone():
    """As a convolution whose kernel is its stride, written out for one patch: 4 x 4, then 2 x 2 of these, twice."""
    torch.manual_seed(0)
    stem = HMLPStem(StemSize(32, 16, 3, 32), norm_layer=LayerNorm, inner_norm=LayerNorm).double()
    images = tokens(2, 3, 32, 32)
    grid = images[:, :, 16:, :16]  # the third patch
    convolutions = [layer for layer in stem.modules() if isinstance(layer, torch.nn.Conv2d)]
    norms = [layer for layer in stem.modules() if isinstance(layer, LayerNorm)]
    ordered = sorted(norms, key=lambda norm: norm is stem.norm)
    for number, (convolution, norm) in enumerate(zip(convolutions, ordered, strict=True)):
        side = convolution.kernel_size[0]
        assert convolution.stride == convolution.kernel_size
        parts = grid.unfold(2, side, side).unfold(3, side, side).permute(0, 2, 3, 1, 4, 5).flatten(3)
        values = norm(parts @ convolution.weight.flatten(1).mT + convolution.bias)
        grid = (torch.nn.functional.gelu(values) if number < 2 else values).permute(0, 3, 1, 2)
    close(stem(images)[:, 2], grid.flatten(1))


def test_hmlp_with_layer_norm_trains_on_a_single_image():
    torch.manual_seed(0)
    stem = HMLPStem(StemSize(32, 16, 3, 32), norm_layer=LayerNorm, inner_norm=LayerNorm).double().train()
    images = tokens(4, 3, 32, 32)
    close(stem(images[:1]), stem(images)[:1])


def test_a_convolutional_stem_spreads_a_patch_over_others():
    torch.manual_seed(0)
    stem, images = LeViTStem(StemSize(64, 16, 3, 32)).double().eval(), tokens(1, 3, 64, 64)
    other = images.clone()
    other[..., 16:32, 16:32] = 0
    moved = (stem(images) - stem(other)).abs().amax((0, 2)) > 1e-9
    assert moved.sum() > 1
    assert moved[5]


def test_layer_norm_gives_all_tokens_one_magnitude_and_norms_across_tokens_do_not():
    scales = torch.arange(1, 17, dtype=torch.float64)[:, None]
    x = tokens(1, 16, 32) * scales

    def spread(norm):
        magnitudes = norm.double()(x).detach().norm(dim=-1)
        return float(magnitudes.max() / magnitudes.min())

    assert spread(LayerNorm(32, eps=1e-12)) == pytest.approx(1)
    assert spread(InstanceNorm(32)) > 3
    assert spread(DynamicTokenNorm(32, 4, (4, 4))) > 1.1


def test_kernels_take_three_parameters_of_a_head_instead_of_a_matrix():
    with torch.device("meta"):
        model = vm.ViT(vm.DynamicTokenNorm().edit(vm.ViTConfig.from_name("S/16")))
    norms = [module for module in model.modules() if isinstance(module, DynamicTokenNorm)]
    assert len(norms) == 10
    assert sum(norm.a.numel() for norm in norms) == 3 * 6 * 10
    assert 6 * 10 * 196**2 > 2e6, "of matrices"


def test_dtn_adds_five_percent_to_the_flops_of_s_star():
    """5.77 to 6.08 G with P as a matrix; the form that the layer uses adds a seventh of that."""
    base = vm.ViTConfig.from_name("S*/16")
    config = edit(base, vm.parse_changes("dtn"))
    assert 100 * (count_macs(config, dense_norms=True) / count_macs(base) - 1) == pytest.approx(5.4, abs=0.5)
    assert 100 * (count_macs(config) / count_macs(base) - 1) < 1
    with torch.device("meta"):
        assert abs(count_params(vm.ViT(config)) / count_params(vm.ViT(base)) - 1) < 1e-4


def test_the_residual_path_of_pre_norm_has_no_norm_and_that_of_post_norm_has_two():
    x = 7 * tokens(2, 5, 32) + 3
    for arm, kept in (("", True), ("placement(attn=post,mlp=post)", False)):
        block = vm.ViT(edit(vm.ViTConfig.from_name("mu1/4"), vm.parse_changes(arm))).blocks[0].double()
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight.data.zero_()
            layer.bias.data.zero_()
        assert torch.equal(block(x), x) == kept


def test_rms_norm_is_layer_norm_of_tokens_whose_mean_is_zero():
    x = tokens(2, 5, 32) + 3
    layer, rms = LayerNorm(32, eps=1e-6).double(), RMSNorm(32, eps=1e-6).double()
    close(rms(x - x.mean(-1, keepdim=True)), layer(x))
    assert (rms(x) - layer(x)).abs().max() > 0.1


def test_parameters_of_norms():
    assert [count_params(norm) for norm in (LayerNorm(32), InstanceNorm(32), ScaleNorm(32))] == [64, 64, 32]


def test_nine_placements_are_nine_models():
    sides = ("pre", "post", "pre+post")
    base = vm.ViTConfig.from_name("mu1/4")
    arms = {(a, m): f"placement(attn={a},mlp={m})" for a in sides for m in sides}
    arms["pre", "pre"] = ""
    assert len({repr(edit(base, vm.parse_changes(arm))) for arm in arms.values()}) == 9
