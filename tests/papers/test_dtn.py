"""Dynamic Token Normalization against the paper's formula and the released code (float64), and the published sizes."""

import math

import pytest
import torch

import vitmods as vm
from vitmods.layers import DynamicTokenNorm, TokenMixing
from vitmods.model.flops import count_macs, count_params

from .support import close, compare


def paper_kernel(weight):
    """The released Linear(3 -> H) on (dx, dy, squared distance) as the paper's a; d counts the other way there."""
    return torch.stack([weight[:, 2], -weight[:, 0], -weight[:, 1]], dim=1)


def from_released(values, prefix=""):
    """Parameters (or gradients: only signs and places move) of the released layer under our names."""
    names = {"weight": "weight", "bias": "bias", "omega_mean": "mean_norm_weight", "omega_var": "var_norm_weight"}
    found = {ours: values[prefix + theirs] for ours, theirs in names.items() if prefix + theirs in values}
    return found | {"a": paper_kernel(values[f"{prefix}pos_proj.weight"])}


def test_paper(golden):
    g = golden("dtn_paper_derived")
    grid, renamed = (int(g["hp.grid"]),) * 2, {"gamma": "weight", "beta": "bias"}
    norm = DynamicTokenNorm(12, int(g["hp.heads"]), grid, eps=float(g["hp.eps"]), dtype=torch.float64)

    def ours(values):
        return {renamed.get(name, name): value for name, value in values.items()}

    norm.load_state_dict(ours(g.group("param")))
    assert not compare(norm, g, ours)
    px, py = norm.kernels(grid)
    close(torch.einsum("hrs,hcw->hrcsw", py, px).reshape(4, 16, 16), g["aux.P"])


@pytest.mark.parametrize("name", ["h4", "h9", "onlyvar", "pool4"])
def test_released_layer(golden, name):
    g = golden(f"dtn_official_{name}")
    grid, statistics = (int(g["hp.resolution"]),) * 2, "variance" if name == "onlyvar" else "both"
    mixing = TokenMixing("released", statistics=statistics, pool=int(g["hp.pool"]))
    options = {"eps": float(g["hp.eps"]), "mixing": mixing, "dtype": torch.float64}
    norm = DynamicTokenNorm(g["in.x"].shape[-1], int(g["hp.heads"]), grid, **options)
    norm.load_state_dict(from_released(g.group("param")))
    assert not compare(norm, g, from_released)


def test_released_block(golden):
    """A block whose two norms are DTN, as the change sets it up with the released code's settings."""
    g = golden("dtn_vit_block")
    config = vm.ViTConfig.from_name("mu2/4", img_size=16, embed_dim=24, num_heads=4, mlp_dim=96, qkv_bias=False)
    change = vm.DynamicTokenNorm(norms="both", variant="released")
    block = vm.ViT(change.edit(config)).blocks[0].double()

    def ours(values):
        plain = {name: value for name, value in values.items() if not name.startswith("norm")}
        norms = {f"{n}.{k}": v for n in ("norm1", "norm2") for k, v in from_released(values, f"{n}.").items()}
        return plain | norms

    block.load_state_dict(ours(g.group("param")))
    assert not compare(block, g, ours)


@pytest.mark.parametrize("heads", [3, 4, 5, 6, 8, 9, 12, 16])
def test_initial_kernels_are_the_released_ones(golden, heads):
    """Equation 7 for the first k * k heads (in another order of heads), noise for the rest."""
    square = math.isqrt(heads) ** 2
    reference = paper_kernel(golden("dtn_init_pos_proj")[f"pos_proj.weight.H{heads}"])[:square]
    a = DynamicTokenNorm(heads, heads, (4, 4)).a.detach()
    assert sorted(a[:square].tolist()) == sorted(reference.tolist())
    assert float(a[square:].abs().max() if square < heads else 0.0) < 0.1


def test_parameters_and_noise_of_a_norm():
    a = DynamicTokenNorm(512, 512, (4, 4), mixing=TokenMixing(init="noise")).a.detach()
    assert float(a.std()) == pytest.approx(0.02, rel=0.1)
    assert float(a.mean().abs()) < 2e-3
    assert count_params(DynamicTokenNorm(48, 6, (4, 4))) == 2 * 48 + 5 * 6


def test_the_separable_form_needs_a_seventh():
    """14 x 14 tokens: 196 / (14 + 14)."""
    base = vm.ViTConfig.from_name("S/16")
    config = vm.DynamicTokenNorm().edit(base)
    plain = count_macs(config.with_(first_blocks=None))
    assert count_macs(config, dense_norms=True) - plain == 7 * (count_macs(config) - plain)
    assert count_macs(config) - plain == 10 * 2 * 196 * 28 * 384
