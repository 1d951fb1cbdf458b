"""The network of BeiT: a ViT with mask tokens or a decoder with them, a head over masked patches, and whether its stem
leaks masked pixels."""

import copy
import math
import warnings
from functools import partial

import torch
from torch import Tensor, nn

from vitmods.model.build import make_stem
from vitmods.model.config import ViTConfig
from vitmods.model.init import cut_normal_
from vitmods.model.vit import ViT
from vitmods.tasks.base import TaskModel
from vitmods.tasks.beit.codes import Codes
from vitmods.tasks.beit.masks import Masks
from vitmods.tasks.beit.recipes import BeitPart
from vitmods.tasks.beit.vae import VaeCodes
from vitmods.util.errors import UserError

_EQUAL = 1e-9  # of tokens in float64, relative to their size


class BeitModel(TaskModel):
    """Images and their masks -> logits (M, K) of the codes of masked patches, image by image; without masks those of
    all patches, (B, T, K). The stem computes visible patches alone if masking changes none of its tokens.

    With a decoder the whole backbone does (MAE: He et al., 2022, arXiv:2111.06377). The decoder is a plain ViT on the
    grid of its tokens, with fixed positions and a mask token in the other places, and the same for all arms.
    """

    def __init__(self, backbone: nn.Module, part: BeitPart) -> None:
        if not isinstance(backbone, ViT) or backbone.vit_config.reads_tokens:
            raise UserError(
                f"BeiT needs mask tokens, which a {type(backbone).__name__} does not have: use a vitmods ViT."
            )
        super().__init__(backbone)
        draw = cut_normal_ if backbone.vit_config.init == "beit" else partial(nn.init.trunc_normal_, std=0.02)
        self.leaks = stem_leaks(backbone)
        self.decoder = _decoder(backbone, part, self.leaks) if part.decoder_depth else None
        if self.decoder is None and backbone.mask_token is None:
            backbone.vit_config = backbone.vit_config.with_(mask_token=True)
            backbone.mask_token = nn.Parameter(torch.empty(1, 1, backbone.embed_dim))
            draw(backbone.mask_token)
        self.head = nn.Linear((self.decoder or backbone).embed_dim, part.codes)
        draw(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.codes: Codes | VaeCodes = VaeCodes(part, backbone) if part.vae_steps else Codes(part, backbone)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        grid: tuple[int, int] = self.backbone.vit_config.grid  # type: ignore[union-attr, assignment]
        return grid

    def forward(self, images: Tensor, masks: Masks | None = None) -> Tensor:
        backbone = self.backbone
        assert isinstance(backbone, ViT)
        if masks is None:
            tokens = backbone.forward_features(images)
        elif self.decoder is not None:
            tokens = backbone.forward_features(images, keep=masks.visible)
        else:
            tokens = backbone.forward_features(images, keep=None if self.leaks else masks.visible, mask=masks.mask)
        patches = tokens[:, backbone.num_prefix_tokens :]
        if self.decoder is not None:
            patches = self._decoded(self.decoder, patches, masks)
        return self.head(patches if masks is None else patches.flatten(0, 1)[masks.masked])

    def _decoded(self, decoder: ViT, patches: Tensor, masks: Masks | None) -> Tensor:
        """Tokens (B, K, C) of visible patches, or of all -> the decoder's (B, T, D)."""
        if masks is not None:
            places = masks.visible[..., None].expand_as(patches)
            patches = patches.new_zeros(*masks.mask.shape, patches.shape[-1]).scatter(1, places, patches)
        grid = patches.mT.unflatten(2, self.grid)
        return decoder.forward_features(grid, mask=None if masks is None else masks.mask)

    def no_weight_decay(self) -> set[str]:
        return set() if self.decoder is None else {f"decoder.{name}" for name in self.decoder.no_weight_decay()}


def _decoder(backbone: ViT, part: BeitPart, leaks: bool) -> ViT:
    """Raise UserError if the backbone cannot compute visible patches alone, or for another width."""
    try:
        if leaks:
            raise UserError("in training, tokens of its stem depend on the pixels of other patches.")
        backbone.check_visible()
    except UserError as error:
        raise UserError(
            f"decoder_depth={part.decoder_depth} needs a model that computes visible patches alone: {error} Leave such "
            "arms out, or set decoder_depth=0 for mask tokens in the model itself."
        ) from None
    config = backbone.vit_config
    if config.num_patches < 2:
        raise UserError("decoder_depth needs images of two patches or more, one of them visible: use smaller patches.")
    unit = math.lcm(4, config.num_heads)
    width = part.decoder_width or max(unit, config.embed_dim // 2 // unit * unit)
    if width % unit:
        raise UserError(f"decoder_width is a multiple of {unit} for {config.num_heads} heads, not {width}.")
    decoder = ViTConfig(
        img_size=config.grid, patch_size=(1, 1), in_chans=config.embed_dim, num_classes=0, embed_dim=width,
        depth=part.decoder_depth, num_heads=config.num_heads, mlp_dim=4 * width, position="sincos2d",
        position_on_prefix=False, class_token=False, pool="none", mask_token=True,
    )  # fmt: skip
    return ViT(decoder)


@torch.no_grad()
def stem_leaks(backbone: ViT) -> bool:
    """Whether, in training, the pixels of a masked patch change the token of any other patch, in any image.

    A stem with overlapping windows leaks, and so does one whose norms use the statistics of a batch. Everything after
    the stem reads the mask token instead, so nothing else can leak.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of statistics that are not fitted, or of few images
        is_outline = next(backbone.patch_embed.parameters()).is_meta  # other weights show the same
        stem = make_stem(backbone.vit_config) if is_outline else copy.deepcopy(backbone.patch_embed)
        stem.to("cpu", torch.float64).train()
        images = stem.example(2, torch.Generator().manual_seed(0)).double()
        (row, column), (rows, columns) = (side // 2 for side in stem.grid_size), stem.patch_size
        patch = ..., slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
        changed = images.clone()
        changed[0][patch] += 1 + images[1][patch]
        before, after = stem(images), stem(changed)
    difference = (after - before).abs().amax(dim=-1)
    difference[0, row * stem.grid_size[1] + column] = 0
    return bool(difference.max() > _EQUAL * before.abs().max())
