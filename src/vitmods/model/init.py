"""Initialize weights as timm, big_vision or BeiT does."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def initialize(model: Any, only: str = "") -> None:
    """Draw the weights of a ViT by the rule that its config names, from PyTorch's global generator.

    ``only`` restricts it to one child module ("head"). Norms and scales start as built.

    - ``timm``: linear weights truncated normal 0.02, biases 0, positions and mask token truncated normal 0.02, other
      tokens normal 1e-6, convolutions of the stem as PyTorch initializes them.
    - ``big_vision``: projections of patches and the representation layer LeCun normal, attention and MLP weights
      Xavier uniform (query, key and value each by itself), MLP biases normal 1e-6, positions normal
      1 / sqrt(C), class and register tokens and head 0.
    - ``beit``: linear weights, convolutions of the stem, positions and tokens normal 0.02, cut at one standard
      deviation, biases 0; the last maps of both branches of block l, from 1, are divided by sqrt(2 l).

    The head's bias starts at ``config.head_bias``. A model on the meta device, without weights, is left as it is.
    """
    if next(model.parameters()).is_meta:  # where PyTorch would import its tracer
        return
    rules = {"timm": _timm, "big_vision": _big_vision, "beit": _beit}
    if model.prompts is not None and not only:
        draw_prompts(model.prompts, model.vit_config.in_chans * math.prod(model.vit_config.patch_size))
    for name, module in model.named_modules():
        if name.startswith(only):
            rules[model.vit_config.init](name, module, model)
    if isinstance(model.head, nn.Linear) and "head".startswith(only or "head"):
        nn.init.constant_(model.head.bias, model.vit_config.head_bias)


def draw_prompts(prompts: Tensor, values: int) -> None:
    """Draw prompts (..., C) as the weights of a map from the ``values`` of a patch (Jia et al., 2022)."""
    bound = math.sqrt(6 / (values + prompts.shape[-1]))
    nn.init.uniform_(prompts, -bound, bound)


def _tokens(model: Any, position_std: float, token_std: float) -> None:
    if isinstance(model.pos_embed, nn.Parameter):
        draw = nn.init.trunc_normal_ if model.vit_config.init == "timm" else nn.init.normal_
        draw(model.pos_embed, std=position_std)
    if model.mask_token is not None:
        nn.init.trunc_normal_(model.mask_token, std=0.02)
    for token in (model.cls_token, model.reg_token):
        if isinstance(token, nn.Parameter):
            nn.init.normal_(token, std=token_std) if token_std else nn.init.zeros_(token)


def _timm(name: str, module: nn.Module, model: Any) -> None:
    if not name:  # the model itself
        _tokens(model, 0.02, 1e-6)
    elif name == "attn_pool":
        latent = model.attn_pool.latent
        std = latent.shape[-1] ** -0.5
        nn.init.trunc_normal_(latent, std=std, a=-2 * std, b=2 * std)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _big_vision(name: str, module: nn.Module, model: Any) -> None:
    bias = getattr(module, "bias", None)
    if not name:  # the model itself
        _tokens(model, model.vit_config.embed_dim**-0.5, 0)
    elif name == "attn_pool":
        nn.init.xavier_uniform_(model.attn_pool.latent[0])
    elif name == "head":
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    elif isinstance(module, nn.Conv2d) or name == "pre_logits":
        weight = module.get_parameter("weight")
        # LeCun normal: variance 1 / fan_in after cutting a normal at two standard deviations, as Flax does.
        std = math.sqrt(1.0 / weight[0].numel()) / 0.87962566103423978
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
        if bias is not None:
            nn.init.zeros_(bias)
    elif isinstance(module, nn.Linear):
        parts = 3 if name.endswith("qkv") else 2 if name.endswith("kv") else 1
        for part in module.weight.chunk(parts):
            nn.init.xavier_uniform_(part)
        if bias is not None:
            nn.init.normal_(bias, std=1e-6) if name.endswith(("fc1", "fc2")) else nn.init.zeros_(bias)


# BeiT cuts at one standard deviation; timm cuts at an absolute 2, which is a hundred of them.
cut_normal_ = partial(nn.init.trunc_normal_, std=0.02, a=-0.02, b=0.02)


def _beit(name: str, module: nn.Module, model: Any) -> None:
    if not name:  # the model itself
        for tensor in (model.pos_embed, model.mask_token, model.cls_token, model.reg_token):
            if isinstance(tensor, nn.Parameter):
                cut_normal_(tensor)
    elif name == "attn_pool":
        cut_normal_(model.attn_pool.latent)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        cut_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
        if name.startswith("blocks.") and name.endswith(("attn.proj", "mlp.fc2")):
            module.weight.div_(math.sqrt(2 * (int(name.split(".")[1]) + 1)))
