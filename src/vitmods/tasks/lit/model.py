"""The two towers of LiT (Zhai et al., 2022, arXiv:2111.07991), and the tokenizer of the text tower."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vitmods.data.records import printable
from vitmods.model.slots import StemConfig
from vitmods.model.vit import vit
from vitmods.tasks.base import TaskModel
from vitmods.tasks.lit.recipes import LitPart
from vitmods.util.errors import UserError, needs
from vitmods.util.limits import read_text

END, SHIFT = 1, 2
"""The token after a text, which also fills it up; what is added to the tokenizer's numbers: 0 is the ViT's padding."""


def _tokenizers() -> Any:
    with needs("Texts need the library tokenizers", "tasks"):
        import tokenizers
    return tokenizers


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Learn byte-pair encoding (Sennrich et al., 2016) of texts in lower case; it encodes any other text too."""
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = library.normalizers.Sequence([library.normalizers.NFKC(), library.normalizers.Lowercase()])
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: str, vocabulary: int) -> Any:
    """Read a tokenizer.json. Raises UserError if it cannot be read or has more tokens than `vocabulary`."""
    library, name = _tokenizers(), printable(path)
    try:
        tokenizer = library.Tokenizer.from_str(read_text(Path(path).expanduser()))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{name} cannot be read as a tokenizer.json: {error}") from error
    tokenizer.no_padding()  # TextTower fills and cuts texts itself; padding would depend on the other texts of a batch
    tokenizer.no_truncation()
    if (size := tokenizer.get_vocab_size()) > vocabulary:
        raise UserError(
            f"{name} has {size:,} tokens, more than the vocabulary of {vocabulary:,}: set vocabulary to it."
        )
    return tokenizer


class TextTower(nn.Module):
    """Tokens (B, T) -> embeddings (B, D) from the last token, which follows the text. Attention is not causal.

    Its tokenizer is part of the state dict, as bytes of JSON.
    """

    def __init__(self, part: LitPart, outputs: int) -> None:
        super().__init__()
        self.transformer = vit(
            img_size=(1, part.text_length),
            patch_size=1,
            in_chans=part.vocabulary + SHIFT,
            num_classes=outputs,
            stem=StemConfig(kind="tokens", bias=False),
            embed_dim=part.text_width,
            depth=part.text_depth,
            num_heads=part.text_heads,
            mlp_dim=part.text_mlp,
            class_token=False,
            pool="none",
            activation="gelu_tanh",  # as big_vision's text towers
            init="big_vision",
        )
        for layer in (self.transformer.patch_embed.proj, self.transformer.head):
            nn.init.normal_(layer.weight, std=part.text_width**-0.5)  # type: ignore[arg-type]
        self.length = part.text_length
        self.tokenizer: Any = None

    def get_extra_state(self) -> Tensor:
        content = b"" if self.tokenizer is None else self.tokenizer.to_str().encode()
        return torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        content = state.cpu().numpy().tobytes().strip()
        self.tokenizer = _tokenizers().Tokenizer.from_str(content.decode()) if content else None

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Tokens int64 (B, T) of texts. The tokenizer must be there."""
        tokens = torch.full((len(texts), self.length), END)
        for row, encoded in zip(
            tokens, self.tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True
        ):
            numbers = encoded.ids[: self.length - 1]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64) + SHIFT
        return tokens

    def forward(self, tokens: Tensor) -> Tensor:
        return self.transformer.head(self.transformer.forward_features(tokens)[:, -1])


class LitModel(TaskModel):
    """Images and tokens -> normalized embeddings (B, D) of both, and the learned scale and bias of similarities; images
    alone -> their embeddings."""

    roles: ClassVar = {"text": "other", "log_scale": "other", "pair_bias": "other"}
    also_forward = ("embed_images", "embed_texts", "scale")

    def __init__(self, backbone: nn.Module, part: LitPart, has_bias: bool) -> None:
        super().__init__(backbone)
        self.is_frozen = part.frozen_image
        if self.is_frozen:
            backbone.requires_grad_(False).eval()
        channels: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
        self.text = TextTower(part, channels)
        self.log_scale = nn.Parameter(torch.full((1,), math.log(part.scale)))
        self.pair_bias = nn.Parameter(torch.full((1,), part.pair_bias)) if has_bias else None

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.is_frozen:
            self.backbone.eval()
        return self

    def no_weight_decay(self) -> set[str]:
        return {f"text.transformer.{name}" for name in self.text.transformer.no_weight_decay()}

    def embed_images(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D) of length 1."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            return normalized(self.backbone(images).float())

    def embed_texts(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, D) of length 1."""
        return normalized(self.text(tokens).float())

    def scale(self) -> Tensor:
        """The factor of similarities, (1,)."""
        return self.log_scale.exp()

    def forward(self, images: Tensor, tokens: Tensor | None = None) -> Any:
        if tokens is None:
            return self.embed_images(images)
        bias = None if self.pair_bias is None else self.pair_bias.clone()
        return self.embed_images(images), self.embed_texts(tokens), self.scale(), bias


def normalized(z: Tensor) -> Tensor:
    """z / (|z| + 1e-8), row by row."""
    return z / (z.norm(dim=-1, keepdim=True) + 1e-8)
