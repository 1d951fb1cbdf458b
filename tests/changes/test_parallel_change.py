"""Sequential blocks to parallel branches and back: where every weight goes, what other changes do there, bad input."""

import pytest
import torch

import vitmods as vm
from vitmods.model.branch_names import parallel_name, sequential_name
from vitmods.util.errors import NoEffect, UserError

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
def test_there_and_back_is_the_same_model(k):
    model = scattered(layer_scale=0.5)
    back = vm.apply(vm.apply(model, vm.Parallel(k)), *vm.parse_changes("sequential"))
    assert back.vit_config == model.vit_config
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert torch.equal(back(images()), model(images()))


def test_other_numbers_of_branches_regroup_the_same_blocks():
    model = scattered()
    direct = vm.apply(model, vm.Parallel(3)).state_dict()
    again = vm.apply(vm.apply(model, vm.Parallel(2)), vm.Parallel(3)).state_dict()
    assert direct.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in direct.items())


def test_names_go_both_ways():
    with torch.device("meta"):
        names = {k: list(vm.vit(f"mu{12 // k}x{k}/4", layer_scale=0.1).state_dict()) for k in (1, 2, 3)}
    for k in (2, 3):
        assert sorted(sequential_name(name, k) for name in names[k]) == sorted(names[1])
        assert sorted(parallel_name(name, k) for name in names[1]) == sorted(names[k])
    assert parallel_name("blocks.7.attn.qkv.weight", 2) == "blocks.3.attns.1.attn.qkv.weight"


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


def test_exact_rms_keeps_the_function_of_parallel_branches():
    model = scattered("mu6x2/4", layer_scale=0.5)
    new = vm.apply(model, *vm.parse_changes("rms"))
    assert {type(b.norm).__name__ for block in new.blocks for b in block.attns} == {"RMSNorm"}
    torch.testing.assert_close(new(images()), model(images()), atol=1e-10, rtol=1e-10)


def test_frozen_blocks_stay_frozen():
    model = scattered("mu4/4")
    model.blocks[1].requires_grad_(False)
    new = vm.apply(model, vm.Parallel())
    assert not any(
        p.requires_grad for part in (new.blocks[0].attns[1], new.blocks[0].ffns[1]) for p in part.parameters()
    )
    assert all(p.requires_grad for part in (*new.blocks[1].attns, new.blocks[0].attns[0]) for p in part.parameters())
    back = vm.apply(new, *vm.parse_changes("sequential"))
    frozen = {name.split(".")[1] for name, p in back.named_parameters() if not p.requires_grad}
    assert frozen == {"1"}


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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mu11/4", "parallel", "the model has 11, which 2 does not divide: give branches=11"),
        ("mu9/4", "parallel", "give branches=3 or 9"),
        ("mu4/4", "parallel(branches=8)", "the model has 4"),
        ("mu1/4", "parallel", "give it another depth"),
        ("mu4/4", "parallel(branches=0)", "at least 1, got 0"),
        ("mu4/4", "dtn(blocks=3)+parallel", "which 2 does not divide"),
        ("mu4/4", "postnorm+parallel", "share one residual sum"),
        ("mu4/4", "normformer(residual_scale=true)+parallel", "set residual_scale=False"),
        ("mu4/4", "parallel+postnorm", "share one residual sum"),
        ("mu4/4", "sequential", NoEffect),
        ("mu2x2/4", "parallel", NoEffect),
    ],
)
def test_what_cannot_be_put_side_by_side(name, changes, message):
    error, pattern = (message, None) if message is NoEffect else (UserError, message)
    with pytest.raises(error, match=pattern):
        vm.apply(scattered(name), *vm.parse_changes(changes))


@pytest.mark.parametrize(
    ("name", "shape"), [("S18x2/16", (18, 2)), ("S9x4/16", (9, 4)), ("S36/16", (36, 1)), ("L/16", (24, 1))]
)
def test_names_of_sizes(name, shape):
    config = vm.ViTConfig.from_name(name)
    assert (config.depth, config.parallel) == shape
