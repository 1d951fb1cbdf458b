"""Gated positional attention against ConViT's released layer (float64), and the models of DTN's Table 10."""

import math

import pytest
import torch

import vitmods as vm
from vitmods.changes.compose import edit
from vitmods.layers import Attention, AttentionSlots, DynamicTokenNorm, GatedPositions
from vitmods.model.flops import count_macs, count_params

from .support import close, compare


def to_ours(values):
    """Released parameters (or their gradients) under our names: the kernel's Linear reads (dx, dy, squared distance)
    there, and its bias has no effect."""
    return {
        "qkv.weight": torch.cat([values["qk.weight"], values["v.weight"]]),
        "proj.weight": values["proj.weight"],
        "proj.bias": values["proj.bias"],
        "positions.a": values["pos_proj.weight"][:, [2, 0, 1]],
        "positions.gate": values["gating_param"],
    }


def test_released_layer(golden):
    g = golden("gpsa_layer")
    heads, dim = int(g["hp.heads"]), g["in.x"].shape[-1]
    attention = Attention(dim, heads, AttentionSlots(positions=GatedPositions(heads, (4, 4))), qkv_bias=False).double()
    attention.load_state_dict(to_ours(g.group("param")))
    assert not compare(attention, g, to_ours)
    close(attention.weights(g["in.x"]), g["aux.attn"])
    assert float(g["grad_param.pos_proj.bias"].abs().max()) < 1e-12  # what we leave out


@pytest.mark.parametrize("heads", [3, 4, 6, 9, 16])
def test_start(golden, heads):
    g, local = golden("gpsa_init"), math.isqrt(heads) ** 2
    positions = GatedPositions(heads, (7, 7))
    reference = g[f"init.pos_proj.weight.H{heads}"][:local][:, [2, 0, 1]]
    torch.testing.assert_close(positions.a.detach()[:local], reference, atol=1e-6, rtol=0)
    px, py = positions.kernels((7, 7))
    p = torch.einsum("hrs,hcw->hrcsw", py, px).reshape(heads, 49, 49)[:local, [0, 24, 48]]
    torch.testing.assert_close(p.detach(), g[f"init.pos_softmax.H{heads}"][:local], atol=1e-6, rtol=0)
    assert positions.gate.tolist() == [1.0] * heads


TABLE_10 = {  # row: arm, blocks with dynamic token norms, blocks with positions in attention
    "LN + MHSA": ("", 0, 0),
    "LN + MHSA with Eqn 6": ("gpsa", 0, 10),
    "DTN without RPE + MHSA": ("dtn(kernel=uniform)", 10, 0),
    "DTN + MHSA": ("dtn", 10, 0),
}


@pytest.mark.parametrize("row", TABLE_10)
def test_every_row_of_table_10_is_an_arm(row):
    arm, norms, positions = TABLE_10[row]
    with torch.device("meta"):
        config = edit(vm.ViTConfig.from_name("S*/16"), vm.parse_changes(arm))
        model = vm.ViT(config)
    kinds = [type(module) for module in model.modules()]
    assert (kinds.count(DynamicTokenNorm), kinds.count(GatedPositions)) == (norms, positions)
    assert (config.embed_dim, config.num_heads) == (432, 9)


def test_counts_of_s_star():
    """The kernels and gates of 9 heads in 10 blocks, and the class token's position less."""
    base = vm.ViTConfig.from_name("S*/16")
    config = vm.PositionalAttention().edit(base)
    with torch.device("meta"):
        assert count_params(vm.ViT(config)) - count_params(vm.ViT(base)) == 10 * 4 * 9 - 432
    assert count_macs(config) - count_macs(config.with_(positional=None)) == 10 * 196 * 28 * 432
