"""Feature maps of a backbone, for the modules that a task puts on them; and backbones without their heads.

The forward of Hugging Face's Pyramid Vision Transformer (Wang et al., ICCV 2021, arXiv:2102.12122) resamples positions
wrongly for images of other sizes, and gives sequences. Its modules are run here in its order instead, with positions
resampled bilinearly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.util.errors import UserError


def pvt_encoder(backbone: nn.Module) -> Any:
    """The encoder of a PvtModel, or of a model with one; None of any other."""
    model = getattr(backbone, "pvt", backbone)
    return getattr(model, "encoder", None) if type(model).__name__ == "PvtModel" else None


def pvt_maps(encoder: Any, images: Tensor) -> list[Tensor]:
    """(B, C, rows, columns) of each stage, the last after the final norm and without its class token."""
    levels: list[Tensor] = []
    maps = images
    for stem, blocks in zip(encoder.patch_embeddings, encoder.block, strict=True):
        patches = stem.projection(maps)
        rows, columns = patches.shape[-2:]
        tokens = stem.layer_norm(patches.flatten(2).transpose(1, 2)) + _positions(stem, rows, columns)
        if stem.cls_token is not None:
            first = stem.cls_token + stem.position_embeddings[:, :1]
            tokens = torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = stem.dropout(tokens)
        for block in blocks:
            tokens = block(tokens, rows, columns, False)[0]
        if len(levels) == len(encoder.block) - 1:
            tokens = encoder.layer_norm(tokens)
        patch_tokens = tokens if stem.cls_token is None else tokens[:, 1:]
        maps = patch_tokens.transpose(1, 2).unflatten(2, (rows, columns)).contiguous()
        levels.append(maps)
    return levels


def _positions(stem: Any, rows: int, columns: int) -> Tensor:
    """The positions of patch tokens, (1, rows * columns, C)."""
    embeddings = stem.position_embeddings if stem.cls_token is None else stem.position_embeddings[:, 1:]
    height, width = (side // patch for side, patch in zip(stem.image_size, stem.patch_size, strict=True))
    if (height, width) == (rows, columns):
        return embeddings
    grid = embeddings.transpose(1, 2).unflatten(2, (height, width))
    resampled = F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=False)
    return resampled.flatten(2).transpose(1, 2)


def last_blocks(backbone: nn.Module, images: Tensor, blocks: int) -> Tensor:
    """Class tokens of the last blocks after the final norm, side by side (B, blocks * C); without a class token, means
    over patches. UserError if the model does not give the outputs of its blocks."""
    if not hasattr(backbone, "forward_intermediates"):
        raise UserError(
            f"{type(backbone).__name__} does not give the outputs of its blocks, which a probe of {blocks} blocks "
            "reads: set probe_blocks=1, or use a vitmods ViT or one of timm."
        )
    run: Any = backbone.forward_intermediates
    count = min(blocks, len(feature_info(backbone)))
    outputs = run(images, count, return_prefix_tokens=True, norm=True, output_fmt="NLC", intermediates_only=True)
    has_class = getattr(backbone, "cls_token", None) is not None
    pairs = [output if isinstance(output, tuple) else (output, output[:, :0]) for output in outputs]
    return torch.cat(
        [prefix[:, 0] if has_class and prefix.shape[1] else patches.mean(1) for patches, prefix in pairs], dim=1
    )


_FOR_A_HEAD = ("attn_pool", "fc_norm", "pre_logits")


def feature_maps(backbone: nn.Module, images: Tensor, norm: bool = True) -> list[Tensor]:
    """(B, C, rows, columns) each, from fine to coarse: one of a plain ViT, its patch tokens after the last block; one a
    stage of a pyramid.

    Args:
        backbone: a vitmods ViT, a timm model with `forward_intermediates` and `feature_info`, or Hugging Face's PVT.
        images: (B, C, H, W).
        norm: whether a model's final norm is applied to the last map, as far as it has one.

    Raises:
        UserError: the model does not have feature maps.
    """
    if (encoder := pvt_encoder(backbone)) is not None:
        return pvt_maps(encoder, images)
    feature_info(backbone)
    run: Any = backbone.forward_intermediates
    return list(run(images, indices=None if is_pyramid(backbone) else 1, norm=norm, intermediates_only=True))


def feature_channels(backbone: nn.Module) -> list[int]:
    """Channels of each map of `feature_maps`. UserError as that."""
    return [int(stage["num_chs"]) for stage in _stages(backbone)]


def feature_strides(backbone: nn.Module) -> list[int]:
    """Stride of each map in pixels. UserError as `feature_maps`."""
    return [int(stage["reduction"]) for stage in _stages(backbone)]


def is_pyramid(backbone: nn.Module) -> bool:
    """Whether its stages have maps of several strides. UserError as `feature_maps`."""
    return len({stage["reduction"] for stage in feature_info(backbone)}) > 1


def feature_info(backbone: nn.Module) -> list[dict[str, Any]]:
    """timm's list of a model's stages or blocks: `num_chs` and `reduction` (the stride) of each."""
    if (encoder := pvt_encoder(backbone)) is not None:
        levels, stride = [], 1
        for stem in encoder.patch_embeddings:
            stride *= stem.projection.stride[0]
            levels.append({"num_chs": stem.projection.out_channels, "reduction": stride})
        return levels
    info: Any = getattr(backbone, "feature_info", None)
    if info is None or not hasattr(backbone, "forward_intermediates"):
        raise UserError(
            f"{type(backbone).__name__} does not give feature maps, which this task needs: use a vitmods ViT, or a "
            "timm model with `forward_intermediates` (vit_*, deit3_*, swin_*, pvt_v2_*, ...), or Hugging Face's PVT."
        )
    return list(info.info if hasattr(info, "info") else info)


def _stages(backbone: nn.Module) -> list[dict[str, Any]]:
    return feature_info(backbone) if is_pyramid(backbone) else feature_info(backbone)[-1:]


def head_of(backbone: nn.Module) -> nn.Module | None:
    """The classifier: that of `get_classifier()` (timm's contract), or the last linear map under a usual name of heads;
    None: not known of this model."""
    if hasattr(backbone, "get_classifier"):
        return backbone.get_classifier()  # type: ignore[operator]
    heads = [getattr(backbone, name, None) for name in ("heads", "head", "classifier", "fc")]
    parts = [part for head in heads if head is not None for part in head.modules() if isinstance(part, nn.Linear)]
    return parts[-1] if parts else None


def check_head(backbone: nn.Module) -> nn.Module:
    """The classifier. Raises UserError if it is not known."""
    if (head := head_of(backbone)) is None:
        raise UserError(
            f"The features of a {type(backbone).__name__} are not known: give it a method get_classifier() that "
            "returns its last linear layer, as timm's models have, or leave out protocols that read features."
        )
    return head


@contextmanager
def head_inputs(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the head in each forward pass: cheaper than all tokens, of which the head reads few."""
    inputs: list[Tensor] = []
    with check_head(backbone).register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].float())):
        yield inputs


def without_head(backbone: nn.Module) -> nn.Module:
    """Remove the head of a model in place; modules that only a head would read are frozen. UserError for a model with
    an unknown head."""
    for name in _FOR_A_HEAD:
        if isinstance(module := getattr(backbone, name, None), nn.Module):
            module.requires_grad_(False)
    if hasattr(backbone, "reset_classifier"):
        backbone.reset_classifier(0)  # type: ignore[operator]
        return backbone
    for name in ("classifier", "head", "heads", "fc"):  # Hugging Face's, and torchvision's
        if isinstance(getattr(backbone, name, None), nn.Module):
            setattr(backbone, name, nn.Identity())
            return backbone
    raise UserError(
        f"{type(backbone).__name__} has an unknown head, which this task cannot remove: use a model with "
        "`reset_classifier`, as timm's and vitmods' have."
    )
