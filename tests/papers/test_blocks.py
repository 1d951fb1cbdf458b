"""Single blocks against the code of NormFormer (fairseq), Sub-LN (torchscale) and Three Things (deit), in float64."""

from functools import partial

import pytest
import torch

import vitmods as vm
from vitmods.fast import Forms
from vitmods.layers import Block, BlockConfig, ParallelBlock
from vitmods.model.slots import BranchConfig, NormConfig

from .support import close, compare


def block_with(change):
    """A block of the golden's size as the change makes it; all norms with the 1e-5 of fairseq and torchscale."""
    before = BranchConfig(before=NormConfig(eps=1e-5))
    config = vm.ViTConfig.from_name("mu/2", img_size=4, embed_dim=12, num_heads=3, mlp_dim=24, attn=before, mlp=before)
    return vm.ViT(change.edit(config)).blocks[0].double()


def fuse(values):
    """q, k and v projections -> our joint one."""
    return {
        f"attn.qkv.{kind}": torch.cat([values[f"self_attn.{p}_proj.{kind}"] for p in "qkv"])
        for kind in ("weight", "bias")
    }


def rename(values, names):
    return {
        f"{ours}.{kind}": values[f"{theirs}.{kind}"] for ours, theirs in names.items() for kind in ("weight", "bias")
    }


NORMFORMER = {
    "norm1": "self_attn_layer_norm",
    "norm1_branch": "attn_ln",
    "attn.proj": "self_attn.out_proj",
    "norm2": "final_layer_norm",
    "mlp.fc1": "fc1",
    "mlp.norm": "ffn_layernorm",
    "mlp.fc2": "fc2",
}


def folded(g):
    """fairseq scales the heads after the output projection: the factors are folded into its rows here."""
    model = fuse(g.group("param")) | rename(g.group("param"), NORMFORMER)
    scale = g["param.c_attn"].repeat_interleave(4)
    model["attn.proj.weight"] = model["attn.proj.weight"] * scale[:, None]
    model["attn.proj.bias"] = model["attn.proj.bias"] * scale
    return model, scale


def test_normformer_layer(golden):
    g, block = golden("normformer_layer"), block_with(vm.NormFormer())
    model, scale = folded(g)
    block.load_state_dict(model)
    expected = fuse(g.group("grad_param")) | rename(g.group("grad_param"), NORMFORMER)
    proj = [expected.pop(f"attn.proj.{name}") for name in ("weight", "bias")]
    grads = compare(block, g, lambda _: expected, turn=lambda x: x.transpose(0, 1))
    assert grads.keys() == {"attn.proj.weight", "attn.proj.bias"}
    weight, bias = grads["attn.proj.weight"], grads["attn.proj.bias"]
    close(weight * scale[:, None], proj[0])
    close(bias * scale, proj[1])
    by_row = (weight * g["param.self_attn.out_proj.weight"]).sum(1) + bias * g["param.self_attn.out_proj.bias"]
    close(by_row.view(3, 4).sum(1), g["grad_param.c_attn"])


@pytest.mark.parametrize("recompute", [False, True])
def test_normformer_with_residual_scale(golden, recompute):
    """With factors of 1 it is the layer above; with others the stream before the MLP is multiplied."""
    g, block = golden("normformer_layer"), block_with(vm.NormFormer(residual_scale=True))
    assert block.residual_scale.gamma.tolist() == [1.0] * 12
    block.load_state_dict(folded(g)[0] | {"residual_scale.gamma": torch.ones(12)})
    x = g["in.x"].transpose(0, 1)
    forward = partial(Forms().run_block, block, recomputes=True) if recompute else block
    close(forward(x).transpose(0, 1), g["out.y"])
    stream = x + block.norm1_branch(block.attn(block.norm1(x)))
    factors = torch.linspace(-1, 2, 12, dtype=torch.float64)
    block.residual_scale.gamma.data.copy_(factors)
    close(forward(x), g["out.y"].transpose(0, 1) + (factors - 1) * stream)


SUBLN = {
    "norm1": "self_attn_layer_norm",
    "attn.norm": "self_attn.inner_attn_ln",
    "attn.proj": "self_attn.out_proj",
    "norm2": "final_layer_norm",
    "mlp.fc1": "ffn.fc1",
    "mlp.norm": "ffn.ffn_layernorm",
    "mlp.fc2": "ffn.fc2",
}


def test_subln_layer(golden):
    g, block = golden("subln_layer"), block_with(vm.SubLN())

    def ours(values):
        return fuse(values) | rename(values, SUBLN)

    block.load_state_dict(ours(g.group("param")))
    assert not compare(block, g, ours)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["deit_block", "deit_block_layerscale"])
def test_deit_block(golden, name, recompute):
    g, gammas = golden(name), {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    block = Block(BlockConfig(24, 3, 96, layer_scale=1e-4 if "layerscale" in name else None)).double()

    def ours(values):
        return {gammas.get(name, name): value for name, value in values.items()}

    block.load_state_dict(ours(g.group("param")))
    assert not compare(block, g, ours, partial(Forms().run_block, block, recomputes=True) if recompute else None)


PARALLEL = {
    "attns.0.norm": "norm1", "attns.1.norm": "norm11", "attns.0.attn": "attn", "attns.1.attn": "attn1",
    "ffns.0.norm": "norm2", "ffns.1.norm": "norm21", "ffns.0.mlp": "mlp", "ffns.1.mlp": "mlp1",
    "attns.0.ls.gamma": "gamma_1", "attns.1.ls.gamma": "gamma_1_1",
    "ffns.0.ls.gamma": "gamma_2", "ffns.1.ls.gamma": "gamma_2_1",
}  # fmt: skip


@pytest.mark.parametrize("name", ["deit_block_parallel2", "deit_block_parallel2_layerscale"])
def test_deit_parallel_block(golden, name):
    g, scale = golden(name), 1e-4 if "layerscale" in name else None
    block = ParallelBlock([Block(BlockConfig(24, 3, 96, layer_scale=scale)) for _ in range(2)]).double().eval()
    theirs = {}
    for ours in block.state_dict():
        module = next(m for m in PARALLEL if ours == m or ours.startswith(f"{m}."))
        theirs[ours] = PARALLEL[module] + ours.removeprefix(module)
    assert set(theirs.values()) == set(g.group("param"))
    block.load_state_dict({ours: g.group("param")[name] for ours, name in theirs.items()})
    assert not compare(block, g, lambda values: {ours: values[name] for ours, name in theirs.items()})
    with torch.no_grad():
        close(block(g["in.x"]), g["out.y"])
