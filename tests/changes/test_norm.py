"""Which norms the change replaces, and what becomes of their weights."""

import itertools
import math

import pytest
import torch

import vitmods as vm
from vitmods.changes.norm import kinds

KINDS = kinds()
MIXING = [name for name, kind in KINDS.items() if not kind.token_wise]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "layer"])
def test_blocks_change_and_the_final_norm_where_it_treats_tokens_alone(base, images, kind):
    new = vm.apply(base, norm(kind))
    for block in new.blocks:
        assert type(block.norm1) is type(block.norm2) is KINDS[kind].module
        assert getattr(block.norm1, "eps", 1e-6) == base.blocks[0].norm1.eps
    assert type(new.norm) is KINDS["layer" if kind in MIXING else kind].module
    if kind in MIXING:  # the last block computes all tokens
        torch.testing.assert_close(new.eval()(images), new.forward_head(new.forward_features(images)))


def norm(kind):
    """The kind with the weights as they are; RMSNorm would be made exact."""
    return vm.Norm(kind, exact=kind != "rms")


@pytest.mark.parametrize(("first", "second"), [*itertools.pairwise(KINDS), *itertools.pairwise([*KINDS][::-1])])
def test_every_kind_becomes_others_and_comes_of_others(base, images, first, second):
    model = base if first == "layer" else vm.apply(base, norm(first))
    new = vm.apply(model, norm(second))
    assert new(images).isfinite().all()
    unit = KINDS[second].unit(base.vit_config.embed_dim)
    torch.testing.assert_close(new.blocks[0].norm1.weight, base.blocks[0].norm1.weight * unit)


def test_options_reach_the_norms(base):
    def norm1(model, *args, **options):
        return vm.apply(model, vm.Norm(*args, **options)).blocks[0].norm1

    heads = base.vit_config.num_heads
    assert norm1(base, "power", warmup=7).warmup == 7
    assert norm1(base, "power").groups == norm1(base, "group").groups == heads
    switched = vm.apply(base, vm.Norm("switchable", batch=False))
    assert switched.blocks[0].norm1.running_mean is None
    assert norm1(switched, "switchable").mean_weight.shape == (3,)


def test_one_gain_is_the_mean_of_the_gains_and_comes_back_to_all(base):
    old = base.blocks[0].norm1.weight
    scalar = vm.apply(base, vm.Norm("scale", gain="scalar"))
    torch.testing.assert_close(scalar.blocks[0].norm1.weight, old.mean(0, keepdim=True) * math.sqrt(len(old)))
    back = vm.apply(scalar, vm.Norm("layer"))
    torch.testing.assert_close(back.blocks[0].norm1.weight, old.mean().expand(len(old)))
    channels = vm.apply(scalar, vm.Norm("scale"))
    torch.testing.assert_close(channels.blocks[0].norm1.weight, scalar.blocks[0].norm1.weight.expand(len(old)))


def test_scale_norm_starts_near_rms_norm(base, images):
    base.eval()
    rms, scale = vm.apply(base, norm("rms")), vm.apply(base, norm("scale"))
    torch.testing.assert_close(scale(images), rms(images), atol=1e-4, rtol=1e-3)


def test_inner_norms_of_another_width(base, images):
    model = vm.apply(base, vm.SubLN(), vm.Norm("scale"))
    inner = model.blocks[0].mlp.norm
    assert inner.weight.shape == (base.vit_config.mlp_dim,)
    torch.testing.assert_close(inner.weight, torch.full_like(inner.weight, math.sqrt(base.vit_config.mlp_dim)))
    assert vm.apply(model, vm.Norm("group"))(images).isfinite().all()


def test_every_kind_is_described_by_itself():
    """In a study of all kinds each card of the report is about its own."""
    record = {kind: vm.Norm(kind).describe() for kind in KINDS}
    for key in ("title", "paper", "url", "summary", "published"):
        assert len({about[key] for about in record.values()}) == len(KINDS)
    assert "77.3 (-2.6) and 77.2 (-3.4)" in record["batch"]["published"]
    assert "No output changes" in record["rms"]["summary"]
    assert "No output changes" not in vm.Norm("rms", exact=False).describe()["summary"]
    model = vm.vit("mu2/8", img_size=32)
    assert vm.diff(model, vm.apply(model, vm.Norm("batch"))).papers == (record["batch"]["paper"],)
