"""One Transformer block for every placement of norms: each place where a change may act is a slot."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitmods.layers import recompute as recompute
from vitmods.layers.attention import Attention
from vitmods.layers.drop import DropPath, LayerScale
from vitmods.layers.mlp import Mlp
from vitmods.layers.norms import LayerNorm
from vitmods.layers.positional_attention import GatedPositions

NormFactory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class BranchNorms:
    """What fills the norm slots of one branch F: ``x = after(x + scale * branch(F(before(x))))``; ``inner`` sits
    inside F, before its last linear map. Each takes the number of channels and returns a module."""

    before: NormFactory | None = None
    inner: NormFactory | None = None
    branch: NormFactory | None = None
    after: NormFactory | None = None


def attend(x: Tensor, norm: nn.Module, attn: Attention, attn_mask: Tensor | None, recomputes: bool) -> Tensor:
    """``attn(norm(x))``, (B, N, C) in and out; ``recomputes`` takes the recompute form where there is one."""
    if recomputes and torch.is_grad_enabled() and recompute.supports(norm):
        return attn.mix(recompute.norm_linear(x, norm, attn.qkv), attn_mask)
    return attn(norm(x), attn_mask=attn_mask)


def feed_forward(x: Tensor, norm: nn.Module, mlp: Mlp, recomputes: bool) -> Tensor:
    """``mlp(norm(x))``, (B, N, C) in and out; ``recomputes`` takes the recompute form where there is one."""
    dropping = mlp.training and mlp.drop1.p > 0
    recomputes = recomputes or recompute.is_recomputed(mlp)
    if recomputes and torch.is_grad_enabled() and not dropping and can_recompute(norm, mlp):
        return recompute.norm_mlp(x, norm, mlp)
    return mlp(norm(x))


def all_token_wise(norms: Iterable[nn.Module]) -> bool:
    """Whether each of these norms, empty slots included, treats each token by itself."""
    return all(isinstance(norm, nn.Identity) or getattr(norm, "token_wise", False) for norm in norms)


def can_recompute(norm: nn.Module, mlp: Mlp) -> bool:
    """Whether an MLP branch has a recompute form."""
    return recompute.supports(norm) and isinstance(mlp.norm, nn.Identity) and isinstance(mlp.act, nn.GELU)


def _fill(factory: NormFactory | None, dim: int) -> nn.Module:
    return factory(dim) if factory else nn.Identity()


class Block(nn.Module):
    """Attention and MLP branches around a residual stream; (B, N, C) in and out.

    The leading arguments are timm's (``block_fn=Block`` works there); ``attn_norms`` and ``mlp_norms`` fill the slots
    and default to ``norm_layer`` before each branch; ``positions`` makes the slot of that name in attention. Parameter
    names are timm's; the slots that timm does not have are ``norm1_branch``, ``norm1_after``, ``norm2_branch``,
    ``norm2_after`` and ``attn.positions``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        scale_attn_norm: bool = False,
        scale_mlp_norm: bool = False,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        norm_layer: NormFactory = LayerNorm,
        mlp_layer: type[nn.Module] | None = None,
        attn_layer: type[nn.Module] | str | None = None,
        depth: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        attn_norms: BranchNorms | None = None,
        mlp_norms: BranchNorms | None = None,
        qk_norm_layer: NormFactory | None = None,
        head_scale: bool = False,
        positions: Callable[[], GatedPositions] | None = None,
    ) -> None:
        super().__init__()
        for name, layer, standard in (("mlp_layer", mlp_layer, "Mlp"), ("attn_layer", attn_layer, "Attention")):
            if layer is not None and getattr(layer, "__name__", layer) not in (standard, ""):
                raise ValueError(f"This block has its own attention and MLP: leave {name} at its default.")
        attn_norms = attn_norms or BranchNorms(before=norm_layer, inner=norm_layer if scale_attn_norm else None)
        mlp_norms = mlp_norms or BranchNorms(before=norm_layer, inner=norm_layer if scale_mlp_norm else None)
        hidden = int(dim * mlp_ratio)
        self.norm1 = _fill(attn_norms.before, dim)
        self.attn = Attention(
            dim,
            num_heads,
            qkv_bias=qkv_bias,
            proj_bias=proj_bias,
            qk_norm=qk_norm_layer or (norm_layer if qk_norm else None),
            norm=_fill(attn_norms.inner, dim),
            positions=positions() if positions else None,
            head_scale=head_scale,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
        )
        self.norm1_branch = _fill(attn_norms.branch, dim)
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm1_after = _fill(attn_norms.after, dim)

        self.norm2 = _fill(mlp_norms.before, dim)
        self.mlp = Mlp(
            dim, hidden, act=act_layer(), norm=_fill(mlp_norms.inner, hidden), bias=proj_bias, drop=proj_drop
        )
        self.norm2_branch = _fill(mlp_norms.branch, dim)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2_after = _fill(mlp_norms.after, dim)

        self.recompute = False
        if device is not None or dtype is not None:
            self.to(device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        first: int | None = None,
        mean_from: int | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C), or only what the reader of the last block needs, exactly:

        ``first`` gives the first tokens (B, first, C), the others only lend their keys and values (needs
        ``tokenwise``); ``mean_from`` gives the mean over tokens ``mean_from:`` as (B, 1, C), for which the last linear
        map runs once an image, since it commutes with the mean (needs ``mean_commutes``).
        """
        if is_causal:
            raise ValueError("This block has no causal attention: give the mask as attn_mask.")
        if first is not None:
            return self._mlp_step(self._add_attn(x[:, :first], self.attn(self.norm1(x), queries=first)))
        x = self._add_attn(x, attend(x, self.norm1, self.attn, attn_mask, self.recompute))
        if mean_from is None:
            return self._mlp_step(x)
        x = x[:, mean_from:]
        h = self.mlp.fc2(self.mlp.hidden(self.norm2(x)).mean(1, keepdim=True))
        return x.mean(1, keepdim=True) + self.drop_path2(self.ls2(h))

    @property
    def tokenwise(self) -> bool:
        """Whether what follows attention treats each token by itself."""
        norms = [self.attn.norm, self.norm1_branch, self.norm1_after]
        norms += [self.norm2, self.mlp.norm, self.norm2_branch, self.norm2_after]
        return all_token_wise(norms)

    @property
    def can_recompute(self) -> bool:
        """Whether a part of this block has a recompute form."""
        return recompute.supports(self.norm1) or self.can_recompute_mlp

    @property
    def can_recompute_mlp(self) -> bool:
        """Whether the MLP branch can be run again in backward."""
        return can_recompute(self.norm2, self.mlp)

    @property
    def mean_commutes(self) -> bool:
        """Whether nothing but linear maps follows the MLP's last layer. Dropout there acts on tokens one by one."""
        plain = isinstance(self.norm2_branch, nn.Identity) and isinstance(self.norm2_after, nn.Identity)
        return plain and self.tokenwise and not (self.training and self.mlp.drop2.p > 0)

    def _add_attn(self, x: Tensor, h: Tensor) -> Tensor:
        return self.norm1_after(x + self.drop_path1(self.ls1(self.norm1_branch(h))))

    def _mlp_step(self, x: Tensor) -> Tensor:
        h = feed_forward(x, self.norm2, self.mlp, self.recompute)
        return self.norm2_after(x + self.drop_path2(self.ls2(self.norm2_branch(h))))
