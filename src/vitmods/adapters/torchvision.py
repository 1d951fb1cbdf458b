"""torchvision's VisionTransformer (vit_b_16 and its sisters) as a vitmods ViT and back, exactly."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.adapters import transfer
from vitmods.adapters.tensors import Coverage, rows_of
from vitmods.model.config import ViTConfig
from vitmods.model.slots import BranchConfig, NormConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError, nearest

_NAMES = {
    "patch_embed.proj": "conv_proj",
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "blocks.*.norm1": "encoder.layers.encoder_layer_*.ln_1",
    "blocks.*.attn.qkv.weight": "encoder.layers.encoder_layer_*.self_attention.in_proj_weight",
    "blocks.*.attn.qkv.bias": "encoder.layers.encoder_layer_*.self_attention.in_proj_bias",
    "blocks.*.attn.proj": "encoder.layers.encoder_layer_*.self_attention.out_proj",
    "blocks.*.norm2": "encoder.layers.encoder_layer_*.ln_2",
    "blocks.*.mlp.fc1": "encoder.layers.encoder_layer_*.mlp.0",
    "blocks.*.mlp.fc2": "encoder.layers.encoder_layer_*.mlp.3",
    "norm": "encoder.ln",
    "pre_logits": "heads.pre_logits",
    "head": "heads.head",
}
_rows = partial(rows_of, table=_NAMES)
# torchvision's published weights were trained with these.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def from_torchvision(model: Any) -> ViT:
    """A vitmods ViT with the config and weights of torchvision's VisionTransformer, checked on random images.

    Raises UserError that lists every part of the model without a counterpart here.
    """
    return read(model)[0]


def read(model: Any) -> tuple[ViT, Coverage]:
    """Like ``from_torchvision``, with the account of all tensors."""
    source, config = f"torchvision's {type(model).__name__}", read_config(model)
    new, coverage = transfer.import_model(source, model, config, _rows, _look)
    new.pretrained_cfg = new.default_cfg = {**new.pretrained_cfg, "mean": _MEAN, "std": _STD}
    return new, coverage


def check_torchvision(name: str) -> None:
    """Raise UserError unless torchvision, or the user in its registry, has a classifier of this name. Its detectors and
    models of segmentation fetch a trained backbone."""
    from torchvision import models

    others = (models.detection, models.segmentation, models.optical_flow, models.quantization, models.video)
    classifiers = sorted({*models.list_models()}.difference(*(models.list_models(module=kind) for kind in others)))
    if name not in classifiers:
        raise UserError(f"torchvision does not have a classifier '{name}'. {nearest(name, classifiers)}")


def to_torchvision(model: ViT) -> nn.Module:
    """torchvision's VisionTransformer with the function, weights, device, type and mode of a ViT, checked on random
    images. Raises UserError naming the slots that torchvision does not have."""
    from torchvision.models.vision_transformer import VisionTransformer

    config = model.vit_config
    with torch.random.fork_rng(devices=[]):
        new: Any = VisionTransformer(
            config.img_size[0],
            config.patch_size[0],
            config.depth,
            transfer.whole_heads(config),
            config.embed_dim,
            config.mlp_dim,
            dropout=config.proj_drop,
            attention_dropout=config.attn_drop,
            num_classes=config.num_classes or 1,
            representation_size=config.embed_dim if config.representation else None,
            norm_layer=partial(nn.LayerNorm, eps=transfer.one_norm(config).eps),
        )
    if not config.num_classes:
        new.heads.head = nn.Identity()
    transfer.refuse_slots("torchvision's VisionTransformer", config, read_config(new))
    transfer.export_model("torchvision's VisionTransformer", model, new, _rows(model.state_dict()), _look)
    return new


def _look(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    tokens = model._process_input(images)
    token = model.class_token.expand(len(images), -1, -1)
    return model.encoder(torch.cat([token, tokens], dim=1)), model(images)


def _uncovered(model: Any) -> list[str]:
    missing = []
    if not isinstance(model.conv_proj, nn.Conv2d):
        missing.append("convolutional stem")
    if not isinstance(model.heads, nn.Identity) and not hasattr(model.heads, "head"):
        missing.append("heads that were replaced (replace model.heads.head instead)")
    head = getattr(model.heads, "head", None)
    if head is not None and not isinstance(head, nn.Linear | nn.Identity):
        missing.append(f"head {type(head).__name__}")
    norms = [m for name, m in model.encoder.named_modules() if name.rpartition(".")[2].startswith("ln")]
    missing += sorted({f"norm {type(m).__name__}" for m in norms if not isinstance(m, nn.LayerNorm)})
    if len({getattr(m, "eps", None) for m in norms}) > 1:
        missing.append("norms with different eps")
    dropouts = [model.encoder.dropout, *(m for b in model.encoder.layers for m in (b.dropout, b.mlp[2], b.mlp[4]))]
    if len({drop.p for drop in dropouts}) > 1 or len({b.self_attention.dropout for b in model.encoder.layers}) > 1:
        missing.append("dropout rates that differ from place to place")
    return missing


def read_config(model: Any) -> ViTConfig:
    """The config of torchvision's VisionTransformer, its weights aside. Raises UserError as ``from_torchvision``."""
    from torchvision.models.vision_transformer import VisionTransformer

    source = f"torchvision's {type(model).__name__}"
    if type(model) is not VisionTransformer:
        raise UserError(f"{source} is not covered; VisionTransformer is. {transfer.OTHERWISE}")
    transfer.refuse(source, _uncovered(model))
    block = model.encoder.layers[0]
    norm = NormConfig("layer", float(model.encoder.ln.eps))
    drop = model.encoder.dropout.p
    head = getattr(model.heads, "head", None)
    return ViTConfig(
        img_size=(model.image_size, model.image_size),
        patch_size=model.conv_proj.kernel_size,
        in_chans=model.conv_proj.in_channels,
        num_classes=head.out_features if isinstance(head, nn.Linear) else 0,
        embed_dim=model.hidden_dim,
        depth=len(model.encoder.layers),
        num_heads=block.self_attention.num_heads,
        mlp_dim=block.mlp[0].out_features,
        attn=BranchConfig(before=norm),
        mlp=BranchConfig(before=norm),
        final_norm=norm,
        representation=hasattr(model.heads, "pre_logits"),
        pos_drop=drop,
        proj_drop=drop,
        attn_drop=block.self_attention.dropout,
    )
