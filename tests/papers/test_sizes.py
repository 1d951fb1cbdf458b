"""Parameter and FLOP counts as published (Touvron et al., Three Things, Table 1, and the official classes)."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.cli import main
from vitmods.layers import LayerNorm
from vitmods.layers.norms import BatchNorm
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs, count_params, count_published
from vitmods.model.slots import NormConfig
from vitmods.papers import TABLES
from vitmods.papers.cost import PEAK, STEP, FullScale, full_scale
from vitmods.recipes.registry import network


def build(name, **overrides):
    with torch.device("meta"):
        return vm.vit(name, **overrides)


A2, NO_POSITION = "a2(layerscale=true)", {"position_on_prefix": False}  # the class token of DeiT III has no position
COUNTS = [  # model, arm, recipe or options; parameters (or millions of them) and billions of multiply-adds, P a matrix
    ("Ti/16", "", A2, 5_721_832, 1.3), ("S/16", "", A2, 22_059_496, 4.6), ("B/16", "", A2, 86_585_320, 17.6),
    ("L/16", "", A2, 304_374_760, 61.6), ("S36/16", "", "a2", 64_637_416, None),
    ("S18x2/16", "", "a2", 64_637_416, None), ("B36/16", "", "a2", 256_675_816, None),
    ("B18x2/16", "", NO_POSITION, 256_675_816, None),
    ("S24x2/16", "", {}, 85.9, 18.3), ("B18x2/16", "", {"layer_scale": 1e-4}, 256.7, 52.5),  # Three Things, Table 3
    ("B/16", "", "augreg", 86_567_656 - 768 + 768 * 769, None),  # timm's, with a layer of representation
    ("S/16", "", "augreg", 22_050_664 - 384 + 384 * 385, None), ("S/32", "", "augreg", 22_878_952 - 384, None),
    ("S/16", "", "better_plain", 22_050_664 - 197 * 384 - 384 + 384 * 385, None),  # fixed positions, no class token
    ("B/16", "dpn", {}, 86_567_656 + 1536 + 1536, None), ("B/32", "dpn", {}, 88_224_232 + 6144 + 1536, None),
    ("S/16", "", "deit", 22_050_664, None),
    ("T*/16", "", "dtn", "5.710", 1.26), ("S/16", "", "dtn", "22.036", 4.60), ("S*/16", "", "dtn", "27.777", 5.77),
    ("B/16", "", "dtn", "86.539", 17.58), ("B*/16", "", "dtn", "86.539", None),
    ("T*/16", "dtn", "dtn", 5.7, 1.40), ("S/16", "dtn", "dtn", 22.1, 4.88),
    ("S*/16", "dtn", "dtn", 27.8, 6.08), ("B/16", "dtn", "dtn", 86.5, 18.13),  # DTN, Table 1
    ("T2T-14", "", {}, 21.5, 6.1),  # DTN, Table 12: ten twelfths of 14 blocks, or the ten of ViT-S
    ("T2T-14", "dtn", {}, 21.5, 6.4), ("T2T-14", "dtn(blocks=10)", {}, 21.5, 6.4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arm", "how", "parameters", "giga"), COUNTS, ids=str)
def test_counts_are_the_published_ones(name, arm, how, parameters, giga):
    """Of the network that a recipe brings, or of options."""
    name, options = (network(name, how), {}) if isinstance(how, str) else (name, how)
    config = edit(vm.ViTConfig.from_name(name, **options), vm.parse_changes(arm))
    with torch.device("meta"):
        count = count_params(vm.ViT(config))
    if isinstance(parameters, int):
        assert count == parameters
    elif isinstance(parameters, str):
        assert f"{count / 1e6:.3f}" == parameters
    else:
        assert count / 1e6 == pytest.approx(parameters, abs=0.07)
    if giga:
        assert count_macs(config, dense_norms=True) / 1e9 == pytest.approx(giga, abs=0.05, rel=8e-3)


@pytest.mark.parametrize(
    ("sequential", "parallel"), [("S36/16", "S18x2/16"), ("S36/16", "S9x4/16"), ("L24/16", "L12x2/16")]
)
def test_parallel_branches_cost_what_sequential_blocks_do(sequential, parallel):
    a, b = build(sequential, layer_scale=1e-4), build(parallel, layer_scale=1e-4)
    assert count_params(a) == count_params(b)
    assert count_macs(a.vit_config) == count_macs(b.vit_config)


@pytest.mark.parametrize(
    ("name", "giga"), [("Ti/16", 1.25), ("S/16", 4.58), ("B/16", 17.56), ("B36/16", 52.5), ("S48/16", 18.2)]
)
def test_multiply_adds_of_the_formula(name, giga):
    """L (12 N C^2 + 2 N^2 C) + T 768 C with N = 197 and T = 196."""
    config = vm.ViTConfig.from_name(name)
    assert count_macs(config) / 1e9 == pytest.approx(giga, rel=5e-3)
    blocks = config.depth * (12 * 197 * config.embed_dim**2 + 2 * 197**2 * config.embed_dim)
    assert count_macs(config) == blocks + 196 * 768 * config.embed_dim + 1000 * config.embed_dim


STEMS = ("levit", "stem(kind=levit,norm=layer)", "local", "hmlp", "hmlp-ln", "stem(kind=linear,norm=batch)",
         "stem(kind=linear,gelu=true)", "stem(kind=linear,norm=batch,gelu=true)")  # fmt: skip
RUN = [  # changes, options: products and values of norms; for those without plain norms the products alone
    *((stem, {"name": "mu2/16", "img_size": (32, 48)}) for stem in STEMS),
    *((stem, {"name": "mu2/8", "img_size": 32, "in_chans": 1}) for stem in STEMS[3:5]),
    ("", {"pool": "map"}),
    ("", {"representation": True}),
    ("", {"pool": "avg", "class_token": False}),
    ("", {"reg_tokens": 3, "in_chans": 1}),
    ("", {"depth": 2, "parallel": 2}),
    ("", {"depth": 1, "parallel": 3, "qk_norm": NormConfig()}),
    ("", {"name": "T2T-14", "img_size": (64, 48), "depth": 2}),
    ("dtn(norms=both)", {"name": "mu12/4", "img_size": (12, 16)}),
    ("gpsa", {"name": "mu12/4", "img_size": (12, 16)}),
]


@pytest.mark.parametrize(("changes", "options"), RUN, ids=str)
def test_counts_are_those_that_run(changes, options):
    """Against PyTorch's own counter, which counts two FLOPs for one multiply-add, on all tokens of all blocks; five for
    each value that passes a norm of a stem or a block."""
    from torch.utils.flop_counter import FlopCounterMode

    config = vm.ViTConfig.from_name(**{"name": "mu2/4", "img_size": 16, "num_classes": 7, **options})
    model, normed = vm.vit(edit(config, vm.parse_changes(changes))).eval(), []
    for module in model.modules():
        if isinstance(module, LayerNorm | BatchNorm):
            module.register_forward_hook(lambda m, args, out: normed.append(out.numel()))
    images = torch.zeros(1, model.vit_config.in_chans, *model.vit_config.img_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.forward_head(model.forward_features(images))
    assert counter.get_total_flops() == 2 * count_macs(model.vit_config)
    if changes in STEMS:
        assert 5 * sum(normed) == count_published(model.vit_config) - count_macs(model.vit_config)


def test_parts():
    """The stem's two layers and its map, fourteen blocks, the class token, the last norm and the head."""
    layers = [values * 192 + 64 * 64 + 64 + 2 * (64 * 64 + 64) + 2 * values + 2 * 64 for values in (147, 576)]
    stem = sum(layers) + 576 * 384 + 384
    block = 4 * 384**2 + 384 + 2 * 384 * 1152 + 1152 + 384 + 4 * 384
    with torch.device("meta"):
        model = vm.vit("T2T-14")
    assert count_params(model.patch_embed) == stem
    assert count_params(model) == stem + 14 * block + 384 + 2 * 384 + 385 * 1000


def test_costs_worked_out_by_hand():
    assert STEP * count_macs(ViTConfig.from_name("B/16")) == pytest.approx(6 * 17.56e9, rel=2e-3)
    low, high = FullScale(1, 3600 * PEAK).gpu_hours(utilization=(0.25, 0.5))
    assert (low, high) == (2, 4)
    cost = full_scale(TABLES["dpn-table1"])
    views = 300 * (1_268_355 // 4096) * 4096
    macs = {"S/32": 1.14e9, "Ti/16": 1.25e9, "B/32": 4.41e9, "S/16": 4.60e9, "B/16": 17.56e9}
    assert cost.trials == 2 * 3 * 5
    assert cost.flops == pytest.approx(2 * 3 * 6 * views * sum(macs.values()), rel=0.01)
    cost = full_scale(TABLES["dpn-table1-21k"])
    assert cost.trials == 2 * 5 * 2
    assert cost.flops == pytest.approx(2 * 6 * (93_000 + 930_000) * 4096 * 28.96e9, rel=0.01)


def test_the_shell_shows_it_and_says_that_it_was_not_run(capsys):
    assert main(["paper", "show", "dpn-table1"]) == 0
    printed = capsys.readouterr().out
    assert "30 trials, 4e+20 FLOPs: about 280 to 560 GPU hours at 20 to 40 % of 989 TFLOP/s" in printed
    assert "not run by us" in printed
