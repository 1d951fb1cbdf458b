"""Initial weights by name: timm's and big_vision's."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vitmods.util.errors import UserError


@torch.no_grad()
def initialize(model: Any, only: str = "") -> None:
    """Draw the weights of a ViT by the rule that its config names, from PyTorch's global generator.

    ``only`` restricts it to one child module ("head"). Norms and scales start as built.

    - ``timm``: linear weights truncated normal 0.02, biases 0, positions and mask token truncated normal 0.02, other
      tokens normal 1e-6, convolutions of the stem as PyTorch initializes them.
    - ``big_vision``: projections of patches and the representation layer LeCun normal, attention and MLP weights
      Xavier uniform (query, key and value each by itself), MLP biases normal 1e-6, positions normal
      1 / sqrt(C), class and register tokens and head 0.

    The head's bias starts at ``config.head_bias``.
    """
    rules = {"timm": _timm, "big_vision": _big_vision}
    if model.vit_config.init not in rules:
        raise UserError(f"There is no initialization '{model.vit_config.init}'. Known: {', '.join(rules)}.")
    for name, module in model.named_modules():
        if name.startswith(only):
            rules[model.vit_config.init](name, module, model)
    if isinstance(model.head, nn.Linear) and "head".startswith(only or "head"):
        nn.init.constant_(model.head.bias, model.vit_config.head_bias)


def _timm(name: str, module: nn.Module, model: Any) -> None:
    if not name:  # the model itself
        if isinstance(model.pos_embed, nn.Parameter):
            nn.init.trunc_normal_(model.pos_embed, std=0.02)
        if model.mask_token is not None:
            nn.init.trunc_normal_(model.mask_token, std=0.02)
        for token in (model.cls_token, model.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
    elif name == "attn_pool":
        latent = model.attn_pool.latent
        std = latent.shape[-1] ** -0.5
        nn.init.trunc_normal_(latent, std=std, a=-2 * std, b=2 * std)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _big_vision(name: str, module: nn.Module, model: Any) -> None:
    if not name:  # the model itself
        if isinstance(model.pos_embed, nn.Parameter):
            nn.init.normal_(model.pos_embed, std=model.vit_config.embed_dim**-0.5)
        if model.mask_token is not None:
            nn.init.trunc_normal_(model.mask_token, std=0.02)
        for token in (model.cls_token, model.reg_token):
            if token is not None:
                nn.init.zeros_(token)
    elif name == "attn_pool":
        nn.init.xavier_uniform_(model.attn_pool.latent[0])
    elif isinstance(module, nn.Conv2d) or name == "pre_logits":
        _lecun_normal(module.get_parameter("weight"))
        _zero_bias(module)
    elif name == "head":
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    elif isinstance(module, nn.Linear):
        parts = 3 if name.endswith("qkv") else 2 if name.endswith("kv") else 1
        for part in module.weight.chunk(parts):
            nn.init.xavier_uniform_(part)
        if name.endswith(("fc1", "fc2")) and module.bias is not None:
            nn.init.normal_(module.bias, std=1e-6)
        else:
            _zero_bias(module)


def _zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _lecun_normal(weight: Tensor) -> None:
    """Variance 1 / fan_in after cutting a normal at two standard deviations, as Flax does."""
    std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
