"""Norms that are blended in: a changed model begins as the function that it was and ends as the changed model."""

import copy

import pytest
import timm
import torch
import transformers as hf
from torch import nn

import vitmods as vm
from vitmods.changes import parse_changes
from vitmods.finetune import BlendedNorms, fit_new_norms
from vitmods.layers import LayerNorm, RMSNorm
from vitmods.study.arms import arm_from_text
from vitmods.study.cells import make_cell
from vitmods.train.optim import Ema
from vitmods.util.errors import UserError

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def trained(kind):
    """A small model whose weights are far from their initialization."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    if kind == "huggingface":
        shape = {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}
        model = hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=8, num_labels=5, **shape))
    else:
        model = timm.create_model("vit_tiny_patch16_224", **sizes) if kind == "timm" else vm.vit("Ti/16", **sizes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return (vm.apply(model, *parse_changes("parallel")) if kind == "parallel" else model).eval()


def logits(model):
    with torch.no_grad():
        outputs = model(IMAGES)
    return getattr(outputs, "logits", outputs)


EVERYWHERE = {
    "dpn": 2,
    "dpn(before=false,norm=rms)": 1,
    "qknorm": 4,
    "qknorm(norm=rms)": 4,
    "subln(rescale=false)": 4,
    "normformer": 4,
    "placement(attn=pre+post,mlp=pre+post,reading=branch)": 4,
    "qknorm+layerscale(init=1.0)+subln(rescale=false)": 8,
}
READ = {
    "dpn(after_position=true)": 3,
    "normformer(head_scale=true,residual_scale=true)": 4,
    "placement(attn=pre+post)": 2,
}
CASES = [("vit", *case) for case in EVERYWHERE.items()]
CASES += [("timm", *case) for case in [*EVERYWHERE.items()][1::2]]
CASES += [("huggingface", *case) for case in [*EVERYWHERE.items()][::3]]
CASES += [("vit", *case) for case in READ.items()] + [("parallel", c, EVERYWHERE[c]) for c in ("qknorm", "normformer")]


@pytest.mark.parametrize(("kind", "change", "count"), CASES)
def test_it_begins_as_the_old_model_and_ends_as_the_changed_one(kind, change, count):
    old = trained(kind)
    new = vm.apply(old, *parse_changes(change), in_place=kind in ("timm", "huggingface") or None)
    names, changed, before = [*new.state_dict()], logits(new), logits(old)
    assert (changed - before).abs().max() > 1e-3
    blended = BlendedNorms(new)
    assert len(blended.norms) == count
    assert torch.allclose(logits(new), before, rtol=0, atol=1e-6 * before.abs().max())
    blended.set(0.5)
    assert not torch.allclose(logits(new), before, atol=1e-4)
    assert not torch.allclose(logits(new), changed, atol=1e-4)
    assert [*new.state_dict()] == names
    blended.set(1.0)
    assert torch.equal(logits(new), changed)
    assert not any(module._forward_hooks for name, module in new.named_modules() if name.endswith("norm"))
    assert not BlendedNorms(new).norms, "it is blended in once"


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_blended_norm_is_its_formula(norm, fraction):
    new = vm.apply(trained("vit"), vm.QKNorm(norm=norm))
    BlendedNorms(new).set(fraction)
    x, q_norm = torch.randn(2, 17, 3, 8), new.blocks[0].attn.q_norm
    assert type(q_norm) is {"layer": LayerNorm, "rms": RMSNorm}[norm]
    assert torch.allclose(q_norm(x), (1 - fraction) * x + fraction * q_norm.forward(x), atol=1e-6)
    for kind in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16):
            assert q_norm(x.to(kind)).dtype == q_norm.forward(x.to(kind)).dtype


@pytest.mark.parametrize("change", ["rms", "norm(batch)", "dtn", "hmlp", "swiglu", "postnorm", "subln", "layerscale"])
def test_norms_that_are_moved_replaced_or_rescaled_are_not_blended(change):
    new = vm.apply(trained("vit"), *parse_changes(change))
    assert not BlendedNorms(new).norms


def test_norms_of_a_change_before_are_still_new():
    first = vm.apply(trained("timm"), vm.QKNorm(), in_place=True)
    assert len(BlendedNorms(vm.apply(first, vm.DualPatchNorm(), in_place=True)).norms) == 6
    read = vm.apply(vm.apply(trained("vit"), vm.QKNorm()), vm.LayerScale(init=1.0))
    assert len(BlendedNorms(read).norms) == 4
    BlendedNorms(read).set(1.0)
    assert len(BlendedNorms(vm.apply(read, vm.DualPatchNorm())).norms) == 2


def test_a_copy_shares_the_fraction():
    new = vm.apply(trained("vit"), vm.QKNorm())
    ema = Ema(new, 0.9)
    blended = BlendedNorms(new, ema.model)
    for fraction in (0.0, 0.4, 1.0):
        blended.set(fraction)
        assert torch.equal(logits(ema.model), logits(new))
    assert copy.deepcopy(new).blocks[0].attn.q_norm is not new.blocks[0].attn.q_norm


@pytest.mark.parametrize("change", ["dpn(norm=rms)", "subln(rescale=false)", "dpn"])
def test_gains_and_biases_are_least_squares_of_what_the_old_model_has_there(change):
    new = vm.apply(trained("vit"), *parse_changes(change))
    fit_new_norms(new, [IMAGES[:1], IMAGES[1:]])
    read = {}
    with torch.no_grad():
        BlendedNorms(new)
        for norm in new.new_norms:
            norm.register_forward_pre_hook(lambda norm, args: read.update({norm: args[0].flatten(0, -2)}))
        new(IMAGES)
        for norm, x in read.items():
            bias = getattr(norm, "bias", None)
            z = (norm.forward(x) - (0 if bias is None else bias)) / norm.weight
            for i in range(x.shape[1]):
                columns = torch.stack([z[:, i], torch.ones(len(z))][: 1 if bias is None else 2], 1)
                best = torch.linalg.lstsq(columns.double(), x[:, i : i + 1].double()).solution.flatten()
                found = torch.stack([norm.weight[i], *([] if bias is None else [bias[i]])]).double()
                assert torch.allclose(found, best, rtol=1e-3, atol=1e-4)
    for kind in ("vit", "timm", "huggingface"):
        assert not fit_new_norms(vm.apply(trained(kind), vm.QKNorm(), in_place=kind != "vit" or None), iter(()))


RECIPE = vm.recipes.plain(epochs=1)


@pytest.mark.parametrize(
    ("arm", "fraction"),
    [("dpn", 0.5), ("qknorm+layerscale", 0.5), ("dpn+norm_blend(0)", 0), ("a=attention", 0), ("rms", 0), ("subln", 0)],
)
def test_an_arm_without_new_norms_is_the_trial_that_it_was(arm, fraction):
    with_blend, plain = (
        make_cell({"base": "mu1/2", "recipe": recipe.to_dict()}, arm_from_text(arm)).recipe
        for recipe in (RECIPE.with_(norm_blend=0.5), RECIPE)
    )
    assert with_blend == plain.with_(norm_blend=fraction)


@pytest.mark.parametrize("arm", ["attention", "layerscale", "subln", "postnorm", "dpn+subln"])
def test_an_arm_that_asks_for_it_without_new_norms_is_refused(arm):
    with pytest.raises(UserError, match="norm_blend"):
        make_cell({"base": "mu1/2", "recipe": RECIPE.to_dict()}, arm_from_text(f"a={arm}+norm_blend(0.5)"))


def test_the_end_of_the_training_is_plain():
    for fraction in (-0.1, 0.95, 1.0):
        with pytest.raises(UserError, match=r"norm_blend must be from 0 to 0\.9"):
            RECIPE.with_(norm_blend=fraction)
