"""The tokens-to-token stem (Yuan et al., 2021, T2T-ViT): overlapping patches, attention between them, twice over."""

from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.mlp import Mlp
from vitmods.layers.norms import LayerNorm
from vitmods.layers.stems.base import STEMS, NormFactory, StemSize
from vitmods.layers.stems.linear import LinearStem
from vitmods.util.errors import UserError

WIDTH = 64  # of the tokens between the splits
FIRST, NEXT = (7, 4, 2), (3, 2, 1)  # side, stride and padding of the soft splits


@STEMS.register("t2t")
class TokensToTokenStem(LinearStem):
    """Three soft splits with a small Transformer layer after each of the first two; (B, channels, height, width) ->
    (B, T, C), a token for 16 x 16 pixels.

    A soft split takes overlapping squares of the image (7 x 7 pixels every 4) or of the tokens laid out as one
    (3 x 3 tokens every 2), and makes each a token. The last one and the map to C channels are a convolution, ``proj``.
    ``norm_layer`` fills the slot after it. Raises ValueError for another patch side than 16.

    The layers attend over 16 and 4 times the tokens of the blocks: a quarter of the multiply-adds of T2T-14. A token
    depends on the whole image: there is no ``keep``.
    """

    patch_wise = False
    first_layer = "first.qkv"
    title, around, published_norm = "tokens to token", False, None
    paper = "Yuan et al.: Tokens-to-Token ViT: Training Vision Transformers from Scratch on ImageNet. ICCV 2021"
    url = "https://arxiv.org/abs/2101.11986"

    @classmethod
    def check(cls, embed_dim: int, patch_size: tuple[int, int]) -> None:
        if patch_size != (16, 16):
            raise UserError(f"The stages of a t2t stem make patches of 16 pixels, not {patch_size}: set patch_size.")

    @classmethod
    def macs(cls, size: StemSize) -> int:
        t, values = size.patches, WIDTH * NEXT[0] ** 2
        first = _layer_macs(16 * t, size.in_chans * FIRST[0] ** 2)
        return first + _layer_macs(4 * t, values) + t * values * size.embed_dim

    @classmethod
    def normed(cls, size: StemSize, inner: bool) -> int:
        first, values = size.in_chans * FIRST[0] ** 2, WIDTH * NEXT[0] ** 2
        return size.patches * (16 * (first + WIDTH) + 4 * (values + WIDTH))

    def __init__(self, size: StemSize, bias: bool = True, norm_layer: NormFactory | None = None) -> None:
        super().__init__(size, bias, norm_layer)
        self.check(size.embed_dim, size.patch_size)
        self.first = TokenTransformer(size.in_chans * FIRST[0] ** 2, WIDTH)
        self.second = TokenTransformer(WIDTH * NEXT[0] ** 2, WIDTH)
        self.proj = nn.Conv2d(WIDTH, size.embed_dim, *NEXT, bias=bias)

    def project(self, images: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, T, C)"""
        rows, columns = images.shape[-2] // 4, images.shape[-1] // 4
        x = self.first(_soft_split(images, *FIRST)).mT.unflatten(2, (rows, columns))
        x = self.second(_soft_split(x, *NEXT)).mT.unflatten(2, (rows // 2, columns // 2))
        return self.proj(x).flatten(2).mT

    def resize_patch(self, new: tuple[int, int]) -> None:
        raise ValueError(f"The stages make patches of 16 pixels, not {new}.")


def _layer_macs(tokens: int, values: int) -> int:
    """A layer on so many tokens of so many values."""
    return tokens * (3 * WIDTH * values + 2 * WIDTH * tokens + 3 * WIDTH * WIDTH)


class TokenTransformer(nn.Module):
    """A Transformer layer with one head that changes the width of the tokens; (B, N, dim) -> (B, N, width).

    ``x = v + proj(attention(q, k, v))`` with q, k, v from ``norm1``, then ``x + mlp(norm2(x))``, whose hidden width is
    its own. Where the width changes, the values replace the tokens in the residual sum.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm2 = LayerNorm(width)
        self.mlp = Mlp(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x))[:, None].chunk(3, dim=-1)
        x = (v + self.proj(F.scaled_dot_product_attention(q, k, v)))[:, 0]
        return x + self.mlp(self.norm2(x))


def _soft_split(x: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """(B, channels, rows, columns) -> (B, N, channels * side * side), a token every ``stride`` places."""
    return F.unfold(x, side, padding=padding, stride=stride).mT
