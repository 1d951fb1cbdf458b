"""vitmods models in timm's registry: after ``import vitmods.adapters.timm_models``, ``timm.create_model`` knows
``vitmods_tiny_patch16_224`` and its sisters. And our block and stems, for timm's VisionTransformer."""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from timm import create_model
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models import vision_transformer as timm_vit
from torch import nn

from vitmods.adapters.apply import apply
from vitmods.adapters.timm import read_config
from vitmods.changes import parse_changes
from vitmods.changes.compose import edit
from vitmods.layers import Attention, AttentionSlots, Block, BlockConfig, BranchNorms, LayerNorm, Mlp, Stem, StemSize
from vitmods.model.build import timm_cfg
from vitmods.model.config import ViTConfig
from vitmods.model.vit import ViT
from vitmods.util.errors import UserError

NAMES = tuple(
    f"{size}_patch{patch}_224"
    for size, patches in {"tiny": (16,), "small": (16, 32), "base": (16, 32), "large": (16, 32), "huge": (14,)}.items()
    for patch in patches
)


def create(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """A vitmods model from what ``timm.create_model`` passes on: all arguments of timm's VisionTransformer that have a
    counterpart here, ``features_only`` and what goes with it, ``device``, ``dtype``, and ``changes`` as in the shell
    ("dpn+rms").

    Raises UserError on pretrained weights (there are none) and on arguments without a counterpart, TypeError on unknown
    ones.
    """
    if pretrained:
        raise UserError(f"There are no pretrained weights for {name}: load a timm model and call vitmods.apply on it.")

    build = partial(_build, name.replace("vitmods_", "vit_"))
    features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
    model: nn.Module = build_model_with_cfg(build, name, False, feature_cfg=features, **arguments)
    if isinstance(model, ViT):
        cfg = timm_cfg(model.vit_config, model.patch_embed)
        fitting = {key: cfg[key] for key in ("input_size", "num_classes", "first_conv")}
        model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **fitting}
    return model


def vitmods_vit(
    pretrained: bool = False, vitmods_config: Mapping[str, Any] | None = None, **arguments: Any
) -> nn.Module:
    """Any ViT of this library by its config, as the folders that `vitmods.save_pretrained` writes name it.

    vitmods_config: as the JSON of a ViTConfig has it; None: the default model. num_classes, img_size and in_chans may
    be others.
    """

    def build(device: Any = None, dtype: torch.dtype | None = None, **shape: Any) -> ViT:
        if unknown := shape.keys() - {"num_classes", "img_size", "in_chans"}:
            raise TypeError(f"vitmods_vit does not take {', '.join(sorted(unknown))}: set it in vitmods_config.")
        with torch.device(device or torch.get_default_device()):
            return ViT(ViTConfig.from_dict({**dict(vitmods_config or {}), **shape})).to(dtype=dtype)

    features = {"out_indices": arguments.pop("out_indices", 3), "feature_cls": "getter"}
    model: nn.Module = build_model_with_cfg(
        build, "vitmods_vit", pretrained, feature_cfg=features, kwargs_filter=("global_pool",), **arguments
    )
    return model


def timm_block(dim: int, num_heads: int, **arguments: Any) -> Block:
    """Our block from the arguments of timm's: ``VisionTransformer(block_fn=timm_block)``.

    Raises UserError for a ``mlp_layer`` or ``attn_layer`` other than timm's ordinary ones, TypeError for an argument
    that timm's block does not have.
    """
    bound = inspect.signature(timm_vit.Block).bind(dim, num_heads, **{"norm_layer": LayerNorm, **arguments})
    bound.apply_defaults()
    block = SimpleNamespace(**bound.arguments)
    for name, standard in (("mlp_layer", "Mlp"), ("attn_layer", "Attention")):
        layer = arguments.get(name)
        if layer is not None and getattr(layer, "__name__", layer) not in (standard, ""):
            raise UserError(f"This block has its own attention and MLP: leave {name} at its default.")
    attn = partial(
        Attention,
        qkv_bias=block.qkv_bias,
        proj_bias=block.proj_bias,
        slots=AttentionSlots(qk_norm=block.norm_layer if block.qk_norm else None),
        attn_drop=block.attn_drop,
        proj_drop=block.proj_drop,
    )
    config = BlockConfig(
        dim,
        num_heads,
        int(dim * block.mlp_ratio),
        attn=attn,
        mlp=partial(Mlp, act=block.act_layer(), bias=block.proj_bias, drop=block.proj_drop),
        attn_norms=BranchNorms(before=block.norm_layer, inner=block.norm_layer if block.scale_attn_norm else None),
        mlp_norms=BranchNorms(before=block.norm_layer, inner=block.norm_layer if block.scale_mlp_norm else None),
        layer_scale=block.init_values,
        drop_path=block.drop_path,
    )
    return Block(config).to(device=block.device, dtype=block.dtype)


def timm_stem(kind: type[Stem], **slots: Any) -> Callable[..., Stem]:
    """Our stem from the arguments of timm's PatchEmbed: ``VisionTransformer(embed_layer=timm_stem(LinearStem))``.
    ``slots`` are the stem's own arguments (``norm_layer``, ``gelu``, ...). A call raises UserError for padding."""

    def make(
        img_size: Any,
        patch_size: Any,
        in_chans: int,
        embed_dim: int,
        strict_img_size: bool = True,
        output_fmt: Literal["NLC", "NHWC"] | None = None,
        dynamic_img_pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Stem:
        if dynamic_img_pad:
            raise UserError("This stem does not pad images: leave dynamic_img_pad off.")
        stem: Any = kind(StemSize(img_size, patch_size, in_chans, embed_dim), **options | slots)
        stem.strict_img_size, stem.output_fmt = strict_img_size, output_fmt or "NLC"
        return stem.to(device=device, dtype=dtype)

    return make


def _build(
    timm_name: str,
    changes: str = "",
    weight_init: str = "",
    fix_init: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> ViT:
    """Our model of what timm builds of the same arguments, on the meta device."""
    if weight_init or fix_init:
        raise UserError("Initial weights are timm's standard ones here: call init_weights('big_vision') for others.")
    config, chosen = read_config(create_model(timm_name, device="meta", **arguments)), parse_changes(changes)
    with torch.device(device or torch.get_default_device()):
        model = ViT(config)
        if chosen and any(parameter.is_meta for parameter in model.parameters()):  # no weights to carry
            model = ViT(edit(config, chosen))
            model.changes = tuple(chosen)
        elif chosen:
            model = apply(model, *chosen)
    return model.to(dtype=dtype)


def _register(name: str) -> None:
    def entry(pretrained: bool = False, **arguments: Any) -> nn.Module:
        return create(name, pretrained, **arguments)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{name.replace('vitmods_', 'vit_')} built by vitmods; ``changes`` as in the shell."
    setattr(sys.modules[__name__], name, register_model(entry))


default_cfgs = generate_default_cfgs(
    {
        f"vitmods_{name}": {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "fixed_input_size": True,
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        for name in NAMES
    }
)
register_model(vitmods_vit)
for _name in NAMES:
    _register(f"vitmods_{_name}")
