"""Parameter and FLOP counts as published (Touvron et al., Three Things, Table 1, and the official classes)."""

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.model.flops import count_macs, count_params
from vitmods.model.slots import NormConfig


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
