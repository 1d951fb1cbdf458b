"""The local-transformer stem: a small transformer inside each patch, as in TNT (Han et al., 2021)."""

import torch
from torch import Tensor, nn

from vitmods.layers.block import Block, BlockConfig
from vitmods.layers.norms import LayerNorm
from vitmods.layers.stems.base import STEMS, NormFactory, Stem, StemSize, patchify
from vitmods.util.errors import UserError

LOCAL_CELLS = 4  # a side of a patch, in the local transformer's cells
LOCAL_DEPTH = 12
LOCAL_HEADS = 4


def local_width(embed_dim: int, patch_size: tuple[int, int]) -> int:
    """Width of the transformer inside a patch: 7/96 of the model's, a multiple of its heads.

    Raises UserError unless the sides of the patch are multiples of 4 pixels.
    """
    if patch_size[0] % LOCAL_CELLS or patch_size[1] % LOCAL_CELLS:
        raise UserError(
            f"The local-transformer stem cuts a patch into {LOCAL_CELLS} x {LOCAL_CELLS} cells: the sides of the patch "
            f"are multiples of {LOCAL_CELLS} pixels, not {patch_size[0]} x {patch_size[1]}."
        )
    return LOCAL_HEADS * max(1, round(embed_dim * 7 / 96 / LOCAL_HEADS))


@STEMS.register("local")
class LocalTransformerStem(Stem):
    """A patch is cut into 4 x 4 cells, which are the tokens of a small pre-norm transformer; their outputs side by
    side are projected to the token of the patch.

    ``proj([LN(transformer(embed(cells) + position))])``; the cells of different patches never meet. Touvron et al.,
    2022, compare such a stem without giving its depth and width: here 12 blocks of 4 heads and 7/96 of the model's
    width (56 for ViT-B), with which ViT-B has the 19.12 GFLOPs that they report. See ``Stem`` for shapes and ``keep``.
    """

    proj: nn.Linear
    first_layer = "embed"
    title = "local transformer"
    paper = "Han et al.: Transformer in Transformer. NeurIPS 2021"
    url = "https://arxiv.org/abs/2103.00112"

    @classmethod
    def check(cls, embed_dim: int, patch_size: tuple[int, int]) -> None:
        local_width(embed_dim, patch_size)

    @classmethod
    def macs(cls, size: StemSize) -> int:
        w, n = local_width(size.embed_dim, size.patch_size), LOCAL_CELLS**2
        inside = LOCAL_DEPTH * (12 * n * w * w + 2 * n * n * w)
        return size.patches * (size.values * w + inside + n * w * size.embed_dim)

    @classmethod
    def normed(cls, size: StemSize, inner: bool) -> int:
        width = local_width(size.embed_dim, size.patch_size)
        return size.patches * LOCAL_CELLS**2 * width * (2 * LOCAL_DEPTH + 1)

    def __init__(self, size: StemSize, bias: bool = True, norm_layer: NormFactory | None = None) -> None:
        super().__init__(size)
        width = local_width(size.embed_dim, size.patch_size)
        self.cell_size = self.patch_size[0] // LOCAL_CELLS, self.patch_size[1] // LOCAL_CELLS
        self.embed = nn.Linear(size.in_chans * self.cell_size[0] * self.cell_size[1], width)
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, LOCAL_CELLS**2, width), std=0.02))
        block = BlockConfig(width, LOCAL_HEADS, 4 * width)
        self.blocks = nn.Sequential(*(Block(block) for _ in range(LOCAL_DEPTH)))
        self.norm_cells = LayerNorm(width)
        self.proj = nn.Linear(LOCAL_CELLS**2 * width, size.embed_dim, bias=bias)
        self.norm = norm_layer(size.embed_dim) if norm_layer else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    def project(self, images: Tensor) -> Tensor:
        return self.project_patches(patchify(images, self.patch_size))

    def project_patches(self, patches: Tensor) -> Tensor:
        images = patches.reshape(-1, self.in_chans, *self.patch_size)
        cells = self.embed(patchify(images, self.cell_size)) + self.position
        return self.proj(self.norm_cells(self.blocks(cells)).view(*patches.shape[:2], -1))
