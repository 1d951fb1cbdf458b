import re

import pytest
import torch
from torch import nn

import vitmods as vm
from vitmods.recipes import Recipe
from vitmods.train.optim import (
    layer_scales,
    make_optimizer,
    parameter_groups,
)


def names_of(model, group):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_only_matrices_decay_and_neither_position_nor_tokens():
    model = vm.vit("mu2/2", img_size=8, in_chans=1, num_classes=10, reg_tokens=2, layer_scale=1e-4)
    decay, no_decay = (names_of(model, group) for group in parameter_groups(model, 0.1))
    assert decay | no_decay == {name for name, _ in model.named_parameters()}
    assert {"pos_embed", "cls_token", "reg_token"} <= no_decay
    assert decay == {
        name
        for name, parameter in model.named_parameters()
        if name.endswith("weight") and parameter.ndim >= 2 and "norm" not in name
    }


def test_sgd_with_momentum():
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, Recipe().with_(optimizer="sgd", momentum=0.8, lr=0.1, weight_decay=0.2))
    assert type(optimizer) is torch.optim.SGD
    assert [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.8, 0.2), (0.8, 0.0)]
    weight = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight, weight - 0.1 * (1 + 0.2 * weight))


def test_the_rate_is_that_of_the_batch():
    for name in ("adamw", "sgd", "lamb"):
        recipe = Recipe().with_(optimizer=name, lr=1e-3, batch_size=64, lr_batch=256)
        assert [group["lr"] for group in make_optimizer(nn.Linear(3, 2), recipe).param_groups] == [2.5e-4, 2.5e-4]


MODELS = {
    "ours": lambda: vm.vit("mu3/2", img_size=8, in_chans=1, num_classes=10, reg_tokens=1),
    "parallel": lambda: vm.vit("mu3x2/2", img_size=8, in_chans=1, num_classes=10),
    "map pooling": lambda: vm.vit("mu3/2", img_size=8, in_chans=1, num_classes=10, pool="map"),
    "post position norm, GPSA": lambda: vm.apply(
        vm.vit("mu3/2", img_size=8, in_chans=1, num_classes=10), *vm.parse_changes("dpn+gpsa(blocks=2)")
    ),
    "timm": lambda: pytest.importorskip("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=24, num_heads=2, num_classes=10
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_layer_decay_is_a_power_of_the_distance_from_the_head(name):
    # BEiT's rule for 3 blocks: stem, positions and tokens are layer 0, block i is i + 1, final norm and head are 4.
    model = MODELS[name]()
    scales = layer_scales(model, 0.5)
    model.group_matcher = None
    assert layer_scales(model, 0.5) == scales, "blocks are found by their parts"
    assert scales.keys() == {name for name, _ in model.named_parameters()}
    for parameter, scale in scales.items():
        words = parameter.split(".")
        if words[0] == "blocks":
            assert scale == 0.5 ** (3 - int(words[1])), parameter
        elif words[0] in ("norm", "fc_norm", "head", "attn_pool"):
            assert scale == 1.0, parameter
        else:
            assert words[0] in ("patch_embed", "pos_embed", "cls_token", "reg_token"), parameter
            assert scale == 0.5**4, parameter


def test_layers_of_a_hugging_face_model():
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    model = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=16, patch_size=8))
    for parameter, scale in layer_scales(model, 0.5).items():
        block = re.search(r"layers?\.(\d)", parameter)
        expected = 3 - int(block[1]) if block else 4 if "embeddings" in parameter else 0
        assert scale == 0.5**expected, parameter


@pytest.mark.parametrize("fields", [{}, {"optimizer": "sgd"}, {"optimizer": "lamb"}, {"moment": "bfloat16"}])
def test_layers_learn_at_their_share_of_the_rate(bench, tmp_path, fields):
    recipe = bench.recipe(layer_decay=0.5, train="attention", steps=2, warmup_steps=0, **fields)
    model = bench.model()
    run = bench.run(tmp_path, recipe, model)
    run._train_step(next(run._batches()))
    scales, held = layer_scales(model, 0.5), 0
    for group in run.optimizer.param_groups:
        for name in names_of(model, group):
            assert group["lr"] == recipe.optimizer.lr * scales[name]
            held += 1
    assert held == sum(p.requires_grad for p in model.parameters()) < len(list(model.parameters()))


@pytest.mark.parametrize(
    ("trainable", "fields", "message"),
    [
        (False, {}, "not have trainable parameters"),
        (
            True,
            {"layer_decay": 0.5},
            r"layer_decay and last.* need a model with blocks .* or with group_matcher.* Linear does not say",
        ),
    ],
)
def test_a_model_that_does_not_suit_the_optimizer_is_refused(trainable, fields, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(nn.Linear(3, 2).requires_grad_(trainable), Recipe().with_(**fields))
