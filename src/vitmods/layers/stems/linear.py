"""The plain stem: each patch through one linear map (Dosovitskiy et al., 2021), written as a strided convolution."""

import torch
from torch import Tensor, nn

from vitmods.layers.stems.base import STEMS, NormFactory, Stem, StemSize
from vitmods.layers.stems.resize import resize_projection


@STEMS.register("linear")
class LinearStem(Stem):
    """``norm(proj(patch))``; (B, channels, height, width) -> (B, T, C), see ``Stem``.

    Parameters are named as in timm: ``proj`` is the projection, ``norm`` the slot after it. ``gelu`` puts a GELU behind
    that (Touvron et al., 2022, Table 7).
    """

    title, around = "linear", True
    proj: nn.Conv2d

    def __init__(
        self, size: StemSize, bias: bool = True, norm_layer: NormFactory | None = None, gelu: bool = False
    ) -> None:
        super().__init__(size)
        self.proj = nn.Conv2d(size.in_chans, size.embed_dim, size.patch_size, size.patch_size, bias=bias)
        self.norm = norm_layer(size.embed_dim) if norm_layer else nn.Identity()
        self.act = nn.GELU() if gelu else nn.Identity()

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C)"""
        found: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return found

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
