"""Feature maps of a backbone, for the modules that a task puts on them; and backbones without their heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vitmods.tasks.huggingface_pvt import pvt_encoder, pvt_info, pvt_maps
from vitmods.util.errors import UserError

_FOR_A_HEAD = ("attn_pool", "fc_norm", "pre_logits")


def feature_maps(backbone: nn.Module, images: Tensor, norm: bool = True) -> list[Tensor]:
    """(B, C, rows, columns) each, from fine to coarse: one of a plain ViT, its patch tokens after the last block; one a
    stage of a pyramid.

    Args:
        backbone: a vitmods ViT, a timm model with `forward_intermediates` and `feature_info`, or Hugging Face's PVT.
        images: (B, C, H, W).
        norm: whether a model's final norm is applied to the last map, as far as it has one.

    Raises:
        UserError: the model has no feature maps.
    """
    if (encoder := pvt_encoder(backbone)) is not None:
        return pvt_maps(encoder, images)
    feature_info(backbone)
    run: Any = backbone.forward_intermediates
    if is_pyramid(backbone):
        return list(run(images, norm=norm, intermediates_only=True))
    return list(run(images, indices=1, norm=norm, intermediates_only=True))


def feature_channels(backbone: nn.Module) -> list[int]:
    """Channels of each map of `feature_maps`. UserError as that."""
    return _of_maps(backbone, "num_chs")


def feature_strides(backbone: nn.Module) -> list[int]:
    """Pixels of the image a side that a position of each map stands for. UserError as `feature_maps`."""
    return _of_maps(backbone, "reduction")


def is_pyramid(backbone: nn.Module) -> bool:
    """Whether its stages have maps of several strides. UserError as `feature_maps`."""
    return len({stage["reduction"] for stage in feature_info(backbone)}) > 1


def feature_info(backbone: nn.Module) -> list[dict[str, Any]]:
    """timm's list of what a model's stages or blocks give: `num_chs` and `reduction` (the stride) of each."""
    if (encoder := pvt_encoder(backbone)) is not None:
        return pvt_info(encoder)
    info: Any = getattr(backbone, "feature_info", None)
    if info is None or not hasattr(backbone, "forward_intermediates"):
        raise UserError(
            f"{type(backbone).__name__} shows no feature maps, which this task is built on: use a vitmods ViT, or a "
            "timm model with `forward_intermediates` (vit_*, deit3_*, swin_*, pvt_v2_*, ...), or Hugging Face's PVT."
        )
    return list(info.info if hasattr(info, "info") else info)


def _of_maps(backbone: nn.Module, name: str) -> list[int]:
    info = feature_info(backbone)
    return [int(stage[name]) for stage in (info if is_pyramid(backbone) else info[-1:])]


def without_head(backbone: nn.Module) -> nn.Module:
    """The same model, changed in place, that ends in features; what only a head would read is frozen. UserError for a
    model whose head is not known."""
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
        f"{type(backbone).__name__} has a head that is not known, which this task does without: use a model with "
        "`reset_classifier`, as timm's and vitmods' have."
    )
