"""The plain stem: each patch through one linear map (Dosovitskiy et al., 2021), written as a strided convolution."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.stems.base import STEMS, Stem
from vitmods.layers.stems.resize import resize_projection


@STEMS.register("linear")
class LinearStem(Stem):
    """``norm(proj(patch))``; (B, channels, height, width) -> (B, T, C), see ``Stem``.

    Takes what timm passes to ``embed_layer``; parameters are named as in timm: ``proj`` is the projection, ``norm``
    the slot after it. ``gelu`` puts a GELU behind that (Touvron et al., 2022, Table 7).
    """

    title, around = "linear", True
    proj: nn.Conv2d

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        norm_layer: Callable[[int], nn.Module] | None = None,
        strict_img_size: bool = True,
        output_fmt: str | None = None,
        dynamic_img_pad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gelu: bool = False,
    ) -> None:
        super().__init__(img_size, patch_size, in_chans, strict_img_size, output_fmt, dynamic_img_pad)
        self.proj = nn.Conv2d(
            in_chans, embed_dim, self.patch_size, self.patch_size, bias=bias, device=device, dtype=dtype
        )
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()
        self.act = nn.GELU() if gelu else nn.Identity()

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C)"""
        found: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return found

    def project_patches(self, patches: Tensor) -> Tensor:
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)

    def finish(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.act(self.norm(tokens))
        return found

    def _resize_patch(self, new: tuple[int, int]) -> None:
        old = self.proj
        proj = nn.Conv2d(self.in_chans, old.out_channels, new, new, bias=old.bias is not None)
        proj.to(device=old.weight.device, dtype=old.weight.dtype)
        with torch.no_grad():
            proj.weight.copy_(resize_projection(old.weight, new))
            if old.bias is not None and proj.bias is not None:
                proj.bias.copy_(old.bias)
        for name, parameter in proj.named_parameters():
            parameter.requires_grad_(old.get_parameter(name).requires_grad)
        self.proj, self.patch_size = proj, new
