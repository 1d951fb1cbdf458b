"""The network of DINO (Caron et al., 2021, arXiv:2104.14294): a backbone for crops of several sizes, and its head."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.model.vit import ViT
from vitmods.tasks.base import TaskModel
from vitmods.tasks.dino.recipes import DinoPart
from vitmods.tasks.dino.views import local_size
from vitmods.util.errors import UserError


class WeightNormLinear(nn.Module):
    """A linear map without bias whose row k is ``weight_g[k] * weight_v[k] / |weight_v[k]|`` (arXiv:1602.07868)."""

    def __init__(self, channels: int, outputs: int, learn_lengths: bool = False) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(outputs, 1), requires_grad=learn_lengths)
        self.weight_v = nn.Parameter(torch.empty(outputs, channels))
        nn.init.kaiming_uniform_(self.weight_v, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_v * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True)))


class DinoHead(nn.Module):
    """Features (B, C) -> outputs (B, K): an MLP of three layers, vectors of length 1, and a weight-normalized layer."""

    def __init__(self, channels: int, part: DinoPart) -> None:
        super().__init__()
        width = part.head_width
        self.mlp = nn.Sequential(
            nn.Linear(channels, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, part.bottleneck)
        )
        std = 0.02 * (2048 / width) ** 0.5  # 0.02 in the paper's width; a narrow head learns slowly from so little
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=std)
                nn.init.zeros_(layer.bias)
        self.last_layer = WeightNormLinear(part.bottleneck, part.prototypes, not part.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class DinoModel(TaskModel):
    """Views of images, of any sizes -> outputs (views * B, K), view by view. `center`: of a teacher's outputs."""

    center: Tensor

    def __init__(self, backbone: nn.Module, part: DinoPart) -> None:
        super().__init__(backbone)
        if isinstance(backbone, ViT):
            backbone.set_input_size(dynamic_img_size=True)
            config = backbone.vit_config
            sizes = local_size(part, config.img_size)
            if any(size % patch for size, patch in zip(sizes, config.patch_size, strict=True)):
                raise UserError(
                    f"Small crops of {sizes[0]}x{sizes[1]} pixels cannot be cut into patches of "
                    f"{config.patch_size[0]}: set --local-size to a multiple of {max(config.patch_size)}."
                )
        elif getattr(backbone, "dynamic_img_size", True) is False:
            raise UserError("DINO trains on crops of several sizes: add dynamic_img_size=true to the base's options.")
        channels: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.head = DinoHead(channels, part)
        self.register_buffer("center", torch.zeros(1, part.prototypes))

    def forward(self, inputs: Tensor, *more: Tensor) -> Tensor:
        sizes = groupby((inputs, *more), key=lambda view: view.shape[-2:])
        features = [self.backbone(torch.cat(list(views))) for _, views in sizes]
        return self.head(torch.cat(features))
