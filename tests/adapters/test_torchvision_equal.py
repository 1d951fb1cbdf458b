"""torchvision's VisionTransformer as our ViT and back: outputs, gradients, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import vision_transformer
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer

import vitmods as vm
from vitmods.adapters import coverage, from_torchvision, to_torchvision
from vitmods.adapters.torchvision import read_config
from vitmods.util.errors import UserError


def small(**options):
    shape = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 48}
    return VisionTransformer(**{**shape, "num_classes": 5, **options})


OPTIONS = [
    {},
    {"representation_size": 32},
    {"norm_layer": partial(nn.LayerNorm, eps=1e-3)},
    {"dropout": 0.1, "attention_dropout": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_there_and_back(scatter, same_function, options):
    reference = scatter(small(**options))
    converted = from_torchvision(reference)
    same_function(reference, converted)
    back = to_torchvision(converted)
    same_function(reference, back)
    assert back.state_dict().keys() == reference.state_dict().keys()
    assert from_torchvision(back).vit_config == converted.vit_config
    account = coverage(reference)
    assert {name for row in account.rows for name in row.theirs} == set(reference.state_dict())
    assert f"{len(reference.state_dict())} tensors read, 0 left out, none missing" in str(account)
    assert "encoder_layer_*.self_attention.in_proj_weight -> blocks.*.attn.qkv.weight  (2x)" in str(account)
    config, rates = converted.vit_config, (options.get("dropout", 0), options.get("attention_dropout", 0))
    assert (config.pos_drop, config.proj_drop, config.attn_drop) == (rates[0], *rates)
    assert {m.p for m in back.modules() if isinstance(m, nn.Dropout)} == {options.get("dropout", 0)}


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_published_configs(name):
    """Built without memory for weights; the config is that of the published size."""
    with torch.device("meta"):
        reference = getattr(vision_transformer, name)()
    assert read_config(reference) == vm.ViTConfig.from_name(f"{name[4].upper()}/{name[-2:]}")
    with pytest.raises(UserError, match="meta device"):
        from_torchvision(reference)


def test_vit_b_16_with_another_head_and_changes(scatter, same_function):
    reference = vision_transformer.vit_b_16(image_size=32)
    reference.encoder.layers = reference.encoder.layers[:2]
    reference.heads.head = nn.Linear(768, 37)
    scatter(reference)
    reference.conv_proj.requires_grad_(False)
    same = vm.apply(reference, vm.LayerScale(1.0))
    same_function(reference, same)
    assert same.vit_config.num_classes == 37
    frozen = [n for n, p in same.named_parameters() if not p.requires_grad]
    assert frozen == ["patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert same.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("place", ["heads", "heads.head"])
def test_without_a_head(scatter, same_function, place):
    reference = scatter(small())
    reference.set_submodule(place, nn.Identity())
    converted = from_torchvision(reference)
    assert converted.vit_config.num_classes == 0
    same_function(reference, converted)
    same_function(reference, to_torchvision(converted))


def replaced(place, module):
    model = small()
    model.set_submodule(place, module)
    return model


LAYER = "encoder.layers.encoder_layer"
STEM = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(24, 3, 2)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: small(conv_stem_configs=STEM), "convolutional stem"),
        (lambda: replaced("heads", nn.Linear(32, 5)), r"heads that were replaced"),
        (lambda: replaced("heads.head", nn.Sequential(nn.Linear(32, 5))), "head Sequential"),
        (lambda: replaced("encoder.ln", nn.BatchNorm1d(17)), "norm BatchNorm1d"),
        (lambda: replaced("encoder.dropout", nn.Dropout(0.3)), "dropout rates"),
        (lambda: small(representation_size=24), r"pre_logits.weight is \(24, 32\), needed \(32, 32\)"),
        (lambda: replaced("extra", nn.Linear(2, 2)), r"without a place here: extra.bias, extra.weight"),
        (lambda: replaced(f"{LAYER}_0.ln_1", nn.LayerNorm(32, 1e-6, bias=False)), "missing: .*ln_1.bias"),
        (lambda: replaced(f"{LAYER}_1.ln_1", nn.LayerNorm(32, eps=1e-7)), "different eps"),
        (lambda: vision_transformer.Encoder(5, 1, 2, 32, 48, 0.0, 0.0), "Encoder is not covered"),
    ],
)
def test_what_cannot_be_read_is_named(make, says):
    with pytest.raises(UserError, match=says):
        from_torchvision(make())
