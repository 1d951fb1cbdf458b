"""Feature maps of Hugging Face's Pyramid Vision Transformer (Wang et al., ICCV 2021, arXiv:2102.12122), version 1.

Its own forward resamples positions wrongly for images of other sizes than it was made for, and gives its maps as
sequences. What is run here are its modules in its order, with positions resampled bilinearly.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def pvt_encoder(backbone: nn.Module) -> Any:
    """The encoder of a PvtModel, or of a model with one; None of any other."""
    model = getattr(backbone, "pvt", backbone)
    return getattr(model, "encoder", None) if type(model).__name__ == "PvtModel" else None


def pvt_info(encoder: Any) -> list[dict[str, Any]]:
    """timm's `feature_info`: `num_chs` and `reduction`, the stride, of each stage."""
    levels, stride = [], 1
    for stem in encoder.patch_embeddings:
        stride *= stem.projection.stride[0]
        levels.append({"num_chs": stem.projection.out_channels, "reduction": stride})
    return levels


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
    """Of patch tokens, (1, rows * columns, C)."""
    embeddings = stem.position_embeddings if stem.cls_token is None else stem.position_embeddings[:, 1:]
    height, width = (side // patch for side, patch in zip(stem.image_size, stem.patch_size, strict=True))
    if (height, width) == (rows, columns):
        return embeddings  # type: ignore[no-any-return]
    grid = embeddings.transpose(1, 2).unflatten(2, (height, width))
    resampled = F.interpolate(grid, size=(rows, columns), mode="bilinear", align_corners=False)
    return resampled.flatten(2).transpose(1, 2)
