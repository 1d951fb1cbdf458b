"""Parameter and FLOP counts as published (Touvron et al., Three Things, Table 1, and the official classes)."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.cli import main
from vitmods.model.config import ViTConfig
from vitmods.model.flops import count_macs, count_params
from vitmods.model.slots import NormConfig
from vitmods.papers import TABLES
from vitmods.papers.cost import PEAK, STEP, FullScale, full_scale


def build(name, **overrides):
    with torch.device("meta"):
        return vm.vit(name, **overrides)


@pytest.mark.parametrize(
    ("name", "millions", "exact", "giga"),
    [
        ("Ti/16", 5.7, 5_721_832, 1.3),
        ("S/16", 22.1, 22_059_496, 4.6),
        ("B/16", 86.6, 86_585_320, 17.6),
        ("L/16", 304.4, 304_374_760, 61.6),
    ],
)
def test_counts_are_the_published_ones(name, millions, exact, giga):
    """The published ones are of models with LayerScale whose class token has no position entry."""
    model = build(name, layer_scale=1e-4, position_on_prefix=False)
    assert count_params(model) == exact
    assert round(exact / 1e6, 1) == millions
    assert round(count_macs(model.vit_config) / 1e9, 1) == giga


@pytest.mark.parametrize(
    ("name", "params"),
    [("S36/16", 64_637_416), ("S18x2/16", 64_637_416), ("B36/16", 256_675_816), ("B18x2/16", 256_675_816)],
)
def test_deep_models_have_exactly_deits_parameters(name, params):
    assert count_params(build(name, position_on_prefix=False)) == params


@pytest.mark.parametrize(
    ("sequential", "parallel"), [("S36/16", "S18x2/16"), ("S36/16", "S9x4/16"), ("L24/16", "L12x2/16")]
)
def test_parallel_branches_cost_what_sequential_blocks_do(sequential, parallel):
    a, b = build(sequential, layer_scale=1e-4), build(parallel, layer_scale=1e-4)
    assert count_params(a) == count_params(b)
    assert count_macs(a.vit_config) == count_macs(b.vit_config)


def test_parallel_models_cost_the_published():
    """Table 3: millions of parameters and giga multiply-adds."""
    for name, layer_scale, millions, giga in (("S24x2/16", None, 85.9, 18.3), ("B18x2/16", 1e-4, 256.7, 52.5)):
        model = build(name, layer_scale=layer_scale)
        assert round(count_params(model) / 1e6, 1) == millions
        assert round(count_macs(model.vit_config) / 1e9, 1) == pytest.approx(giga, abs=0.11)


@pytest.mark.parametrize(
    ("name", "giga"), [("Ti/16", 1.25), ("S/16", 4.58), ("B/16", 17.56), ("B36/16", 52.5), ("S48/16", 18.2)]
)
def test_multiply_adds_of_the_formula(name, giga):
    """L (12 N C^2 + 2 N^2 C) + T 768 C with N = 197 and T = 196."""
    config = vm.ViTConfig.from_name(name)
    assert count_macs(config) / 1e9 == pytest.approx(giga, rel=5e-3)
    blocks = config.depth * (12 * 197 * config.embed_dim**2 + 2 * 197**2 * config.embed_dim)
    assert count_macs(config) == blocks + 196 * 768 * config.embed_dim + 1000 * config.embed_dim


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ("", {"pool": "map"}),
        ("", {"representation": True}),
        ("", {"pool": "avg", "class_token": False}),
        ("", {"reg_tokens": 3, "in_chans": 1}),
        ("", {"depth": 2, "parallel": 2}),
        ("", {"depth": 1, "parallel": 3, "qk_norm": NormConfig()}),
        ("", {"name": "T2T-14", "img_size": (64, 48), "depth": 2}),
        ("dtn(norms=both)", {"name": "mu12/4", "img_size": (12, 16)}),
        ("gpsa", {"name": "mu12/4", "img_size": (12, 16)}),
    ],
    ids=str,
)
def test_multiply_adds_are_those_that_run(changes, overrides):
    """Against PyTorch's own counter, which counts two FLOPs for one multiply-add, on all tokens of all blocks."""
    from torch.utils.flop_counter import FlopCounterMode

    config = vm.ViTConfig.from_name(**{"name": "mu2/4", "img_size": 16, "num_classes": 7, **overrides})
    model = vm.vit(edit(config, vm.parse_changes(changes))).eval()
    images = torch.zeros(1, model.vit_config.in_chans, *model.vit_config.img_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.forward_head(model.forward_features(images))
    assert counter.get_total_flops() == 2 * count_macs(model.vit_config)


TABLE_12 = {"": 6.1, "dtn": 6.4, "dtn(blocks=10)": 6.4}  # ten twelfths of 14 blocks, or the ten of ViT-S


@pytest.mark.parametrize(("arm", "giga"), TABLE_12.items())
def test_table_12(arm, giga):
    config = edit(vm.ViTConfig.from_name("T2T-14"), vm.parse_changes(arm))
    with torch.device("meta"):
        model = vm.ViT(config)
    assert count_params(model) / 1e6 == pytest.approx(21.5, abs=0.05)
    assert count_macs(config, dense_norms=True) / 1e9 == pytest.approx(giga, abs=0.05)


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
