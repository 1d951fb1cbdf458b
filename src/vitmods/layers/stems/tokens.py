"""The stem of sequences: a table with a vector for each token of a vocabulary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.layers.stems.base import STEMS, NormFactory, Stem, StemSize
from vitmods.util.errors import UserError


@STEMS.register("tokens")
class TokenStem(Stem):
    """``norm(proj[token])``; tokens int64 (B, T) -> (B, T, C), see ``Stem``.

    A sequence is an image of one row whose patches are single pixels: ``size`` has (1, T) for the longest sequences,
    patches of 1 and as many channels as there are tokens. Any T up to that is taken. Token 0 is padding. The table
    starts normal with standard deviation 1, as in Long Range Arena's code (Tay et al., ICLR 2021).
    """

    title, patch_wise, sequences, published_norm = "table of tokens", False, True, None
    paper = "Tay et al.: Long Range Arena: A Benchmark for Efficient Transformers. ICLR 2021"
    url = "https://arxiv.org/abs/2011.04006"
    proj: nn.Embedding

    def __init__(self, size: StemSize, bias: bool = False, norm_layer: NormFactory | None = None) -> None:
        super().__init__(size)
        if bias:
            raise UserError("A table of tokens does not have a bias: set bias=False in the stem.")
        if size.img_size[0] != 1 or size.patch_size != (1, 1):
            raise UserError(
                f"Sequences are images of one row, img_size (1, length) and patch_size 1; got {size.img_size} and "
                f"{size.patch_size}."
            )
        self.proj = nn.Embedding(size.in_chans, size.embed_dim)
        self.norm = norm_layer(size.embed_dim) if norm_layer else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        return {"proj.weight"}  # a table of vectors, of which a step sees few

    @classmethod
    def macs(cls, size: StemSize) -> int:
        return 0

    def as_images(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, 1, 1, T)"""
        if isinstance(tokens, torch.fx.Proxy):
            raise UserError("torch.fx cannot trace a model of sequences, whose length differs from call to call.")
        return tokens[:, None, None] if tokens.ndim == 2 else tokens

    def padding(self, images: Tensor) -> Tensor | None:
        """(B, T), True for token 0; None where there is none, which is asked only on a CPU: a compiled graph cannot,
        and a GPU would be waited for."""
        mask = images.flatten(1) == 0
        return mask if torch.compiler.is_compiling() or images.device.type != "cpu" or mask.any() else None

    def example(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Tokens of the longest sequences, drawn evenly."""
        return torch.randint(1, self.in_chans, (count, self.img_size[1]), generator=generator)

    def project(self, images: Tensor) -> Tensor:
        """(B, 1, 1, T) or (B, T) -> (B, T, C)"""
        return F.embedding(images.flatten(1), self.proj.weight)

    def _check(self, images: Tensor) -> None:
        if images.is_floating_point():
            raise ValueError("This model expects tokens as integers (B, T), got floating-point numbers.")
        if images.shape[-1] > self.img_size[1]:
            raise ValueError(
                f"A sequence of {images.shape[-1]} tokens is longer than the {self.img_size[1]} that the model is made "
                f"for: cut it, or call set_input_size((1, {images.shape[-1]})) on the model."
            )
