"""Sequential blocks to parallel branches and back: where every weight goes, what other changes do there, bad input."""

import pytest
import torch

import vitmods as vm
from vitmods.model.branch_names import parallel_name, sequential_name

SIZE = {"img_size": 8, "num_classes": 5}


def scattered(name="mu12/4", **overrides):
    torch.manual_seed(0)
    model = vm.vit(name, **(SIZE | overrides))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.double().eval()


def images(n=2):
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("k", [2, 3, 4, 12])
def test_the_formula_on_the_old_blocks(k):
    model = scattered(layer_scale=0.5)
    new = vm.apply(model, vm.Parallel(k))
    assert (new.vit_config.depth, new.vit_config.parallel, len(new.blocks)) == (12 // k, k, 12 // k)
    with torch.no_grad():
        x = model._embed(images())
        for i in range(0, 12, k):
            blocks = model.blocks[i : i + k]
            x = x + sum(b.ls1(b.attn(b.norm1(x))) for b in blocks)
            x = x + sum(b.ls2(b.mlp(b.norm2(x))) for b in blocks)
        torch.testing.assert_close(new(images()), model.forward_head(model.norm(x)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("k", [2, 3, 12])
def test_there_and_back_is_the_same_model_and_other_numbers_regroup_the_same_blocks(k):
    model = scattered(layer_scale=0.5)
    new = vm.apply(model, vm.Parallel(k))
    back = vm.apply(new, *vm.parse_changes("sequential"))
    assert back.vit_config == model.vit_config
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert torch.equal(back(images()), model(images()))
    if k != 3:
        direct, again = (vm.apply(it, vm.Parallel(3)).state_dict() for it in (model, new))
        assert direct.keys() == again.keys()
        assert all(torch.equal(value, again[name]) for name, value in direct.items())


def test_names_go_both_ways():
    with torch.device("meta"):
        names = {k: list(vm.vit(f"mu{12 // k}x{k}/4", layer_scale=0.1).state_dict()) for k in (1, 2, 3)}
    for k in (2, 3):
        assert sorted(sequential_name(name, k) for name in names[k]) == sorted(names[1])
        assert sorted(parallel_name(name, k) for name in names[1]) == sorted(names[k])
    assert parallel_name("blocks.7.attn.qkv.weight", 2) == "blocks.3.attns.1.attn.qkv.weight"
    assert parallel_name("blocks.7.norm1_after.weight", 2) == "blocks.7.norm1_after.weight"


# Changes whose rules for weights name the parts of a block, on a model of parallel branches.
@pytest.mark.parametrize(
    "other",
    [
        "rms", "norm(kind=rms,exact=false)", "batchnorm", "scalenorm", "normformer", "subln", "dtn(blocks=3)", "dpn",
        "gpsa", "placement(attn=post,mlp=pre+post,reading=branch)", "layerscale(init=1.0)",
    ],
)  # fmt: skip
def test_other_changes_on_parallel_branches_carry_as_on_sequential_blocks(other):
    """Before or after Parallel, the weights are the same."""
    sequential = {"dtn(blocks=3)": "dtn(blocks=6)"}.get(other, other)
    model = scattered()
    results = []
    for row in (f"parallel+{other}", f"{sequential}+parallel"):
        torch.manual_seed(2)
        results.append(vm.apply(model, *vm.parse_changes(row)))
    first, second = results
    assert first.vit_config == second.vit_config
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], atol=1e-12, rtol=1e-12)


def test_diff_reports_the_drift_on_given_images():
    model = scattered()
    new = vm.apply(model, vm.Parallel())
    difference = vm.diff(model, new, images(3))
    with torch.no_grad():
        old_out, new_out = model(images(3)), new(images(3))
    assert difference.drift == pytest.approx(float((old_out - new_out).abs().max() / old_out.abs().max()))
    assert "outputs on 3 given images differ by" in str(difference)
    assert "outputs on random images differ by" in str(vm.diff(model, new))
    assert difference.params[0] == difference.params[1]
    assert difference.macs[0] == difference.macs[1]
