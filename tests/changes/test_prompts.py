"""Prompts: the written-out loop over blocks, in a ViT of ours and in place in others; what an arm of them trains."""

import copy
import pickle

import pytest
import timm
import torch
from torchvision.models import VisionTransformer
from transformers import Dinov2Config, Dinov2ForImageClassification, ViTConfig, ViTForImageClassification

import vitmods as vm
from vitmods.study.arms import arm_from_text, make_arms, with_matched_ranks
from vitmods.train.optim import parameter_groups
from vitmods.util.errors import NotCertified, UserError

SHALLOW, DEEP = vm.Prompts(3), vm.Prompts(3, deep=True)


def huggingface(kind, config):
    return kind(config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16,
                       patch_size=8, num_labels=5))  # fmt: skip


MODELS = {
    "vitmods": lambda: vm.vit("mu2/4", img_size=16, num_classes=5),
    "timm": lambda: timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, depth=2, num_classes=5),
    "torchvision": lambda: VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=5),
    "vit": lambda: huggingface(ViTForImageClassification, ViTConfig),
    "dinov2": lambda: huggingface(Dinov2ForImageClassification, Dinov2Config),
}


OURS = [{"parts": {"blocks": ["blocks.0", "blocks.1"]}}]


def outputs(model, images):
    found = model(images)
    return getattr(found, "logits", found)


def written_out(old, new, change, name, images):
    """The old model, whose blocks get prompts in front of the patches and lose them again."""
    blocks = [old.get_submodule(block) for block in getattr(new, "vm_record", OURS)[0]["parts"]["blocks"]]
    prompts = (
        new.prompts if name == "vitmods" else torch.stack([p for n, p in new.named_parameters() if "prompts" in n])
    )

    def enter(block, args, i):
        x = args[0]
        if change.deep or i == 0:
            x = torch.cat([x[:, :1], prompts[i].expand(len(x), -1, -1), x[:, 1:]], 1)
        return (x, *args[1:])

    def leave(block, args, out, i):
        x = out if isinstance(out, torch.Tensor) else out[0]
        if change.deep or i == len(blocks) - 1:
            x = torch.cat([x[:, :1], x[:, 4:]], 1)
        return x if isinstance(out, torch.Tensor) else (x, *out[1:])

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda block, args, i=i: enter(block, args, i))
        block.register_forward_hook(lambda block, args, out, i=i: leave(block, args, out, i))
    old.forms = None
    return outputs(old, images)


@pytest.mark.parametrize("prompts", [SHALLOW, DEEP], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_read_learned_tokens(name, prompts):
    if name != "vitmods" and not prompts.deep:
        with pytest.raises(UserError, match="write prompts"):
            vm.apply(MODELS[name](), prompts, in_place=True)
        return
    torch.manual_seed(0)
    old = MODELS[name]().eval()
    for parameter in old.parameters():  # new heads and biases are zero
        torch.nn.init.normal_(parameter, std=0.3)
    new = vm.apply(old, prompts, **({} if name == "vitmods" else {"in_place": True}))
    images = torch.randn(2, 3, 16, 16)
    usual = outputs(old, images)
    expected = written_out(copy.deepcopy(old), new, prompts, name, images)
    assert (expected - usual).abs().max() > 1e-3 * usual.abs().max()
    for model in (new, copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        torch.testing.assert_close(outputs(model, images), expected, atol=1e-5, rtol=1e-4)
    trained = vm.train_only(new, "prompts")
    rows = {role: count for role, count, _ in trained.rows if count}
    width = 32 if name == "vitmods" else 192 if name == "timm" else 16
    assert rows == {"prompts": 3 * width * (2 if prompts.deep else 1), "head": rows["head"]}
    outputs(new, images).square().mean().backward()
    assert all(p.grad.abs().max() > 0 for n, p in new.named_parameters() if "prompts" in n)


def test_features_are_without_prompts():
    model = vm.apply(vm.vit("mu2/4", img_size=16, num_classes=5).eval(), SHALLOW)
    images = torch.randn(2, 3, 16, 16)
    assert model.forward_features(images).shape == (2, 17, 32)
    _, (first, last) = model.forward_intermediates(images, return_prefix_tokens=True)
    assert first[0].shape == last[0].shape == (2, 32, 4, 4)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(images), model.eval()(images))
    deep = vm.apply(model, DEEP)
    whole = deep.forward_intermediates(images, [0], intermediates_only=True)[0]
    deep.prune_intermediate_layers([0])
    assert deep.prompts.shape == (1, 3, 32)
    torch.testing.assert_close(deep.forward_intermediates(images, [0], intermediates_only=True)[0], whole)


PLACES = {
    "rotary positions": vm.RoPE(),
    "relative positions": vm.RelativePositions(),
    "the norm dynamic_token": vm.DynamicTokenNorm(),
    "the norm batch": vm.Norm("batch"),
    "values of the first block": vm.ValueResidual(),
}


@pytest.mark.parametrize("reason", PLACES)
def test_blocks_that_ask_for_places_are_refused(reason):
    with pytest.raises(UserError, match=reason):
        vm.apply(vm.vit("mu2/4", img_size=16, num_classes=5), PLACES[reason], SHALLOW)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "vit_relpos_small_patch16_224"])
def test_blocks_of_others_that_ask_for_places_are_refused(name):
    size = {"img_size": 28 if "eva" in name else 32}
    model = timm.create_model(name, depth=1, embed_dim=32, num_heads=2, num_classes=5, **size)
    with pytest.raises(NotCertified, match="does not treat tokens alike"):
        vm.apply(model, DEEP, in_place=True)


def test_masks_of_attention_are_refused():
    model = vm.apply(vm.vit("mu2/4", img_size=16), SHALLOW)
    with pytest.raises(UserError, match="have no place"):
        model(torch.randn(1, 3, 16, 16), is_causal=True)


ARMS = {
    "prompts(10)": (vm.Prompts(), "prompts"),
    "prompts(4,deep=true)": (vm.Prompts(4, deep=True), "prompts"),
    "prompts+attention": (vm.Prompts(), "attention+prompts"),
    "prompts+full": (vm.Prompts(), "all"),
    "prompts+train(prompts+norms)": (vm.Prompts(), "prompts+norms"),
}


@pytest.mark.parametrize("text", ARMS)
def test_an_arm_trains_its_prompts(text):
    arm, (prompts, train) = arm_from_text(text), ARMS[text]
    assert (arm.changes, arm.recipe) == ((prompts,), {"train": train})
    assert type(arm).from_identity(arm.name, arm.identity()) == arm
    assert make_arms({"a": list(arm.changes)})[0].recipe["train"] == "prompts"


def test_ranks_that_match_attention():
    arms = make_arms(["attention", "lora", "small=dora(rank=2)+lr(1e-3)"])
    matched = with_matched_ranks(arms)
    assert [arm.name for arm in matched] == ["attention", "lora", "small"]
    assert [arm.recipe["train"] for arm in matched] == ["attention", "lora(rank=match)", "dora(rank=match)"]
    assert with_matched_ranks(matched) == matched
    with pytest.raises(UserError, match="add an arm lora"):
        with_matched_ranks(arms[:1])
    counts = {arm.name: vm.train_only(MODELS["vitmods"](), arm.recipe["train"]).trained for arm in matched}
    most = 32 * 6  # parameters of one rank
    assert all(abs(count - counts["attention"]) <= most for count in counts.values()), counts


def test_prompts_need_trained_weights():
    with pytest.raises(UserError, match="add --from"):
        vm.Study("mu2/2", ["prompts"], "digits")


@pytest.mark.parametrize("in_place", [False, True])
def test_prompts_do_not_decay(in_place):
    model = vm.apply(MODELS["timm"](), DEEP, in_place=in_place)
    groups = parameter_groups(model, weight_decay=0.1, decay_all=False, layer_decay=None)
    decaying = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert not decaying & {id(p) for name, p in model.named_parameters() if "prompts" in name}
