"""LiT's part of a recipe, the published training of a text tower, and one for a few thousand pairs."""

from dataclasses import dataclass
from typing import ClassVar

from vitmods.recipes.recipe import TASK_PARTS, Recipe, TaskPart, require, weight_decay_from_big_vision
from vitmods.recipes.registry import recipe


@TASK_PARTS.register("lit")
@dataclass(frozen=True)
class LitPart(TaskPart):
    """Settings of the task lit."""

    frozen_image: bool = True
    """whether the image tower keeps its weights; otherwise both towers are trained"""
    text_width: int = 512
    """channels of the text tower"""
    text_depth: int = 12
    """its blocks"""
    text_heads: int = 8
    """its attention heads"""
    text_mlp: int = 2048
    """hidden channels of its MLPs"""
    text_length: int = 16
    """tokens of a text with its end; longer texts are cut, shorter ones are filled with the end token"""
    vocabulary: int = 32000
    """tokens at most, which are learned from the captions of training"""
    tokenizer: str | None = None
    """tokenizer.json of the library tokenizers; None: byte-pair encoding of the captions of training"""
    scale: float = 10.0
    """initial factor of the similarities, the inverse of the temperature; learned"""
    pair_bias: float = -2.71
    """initial bias of the similarities with the loss sigmoid; learned"""
    prompts: tuple[str, ...] = ("a photo of a {}.",)
    """sentences with {} for the name of a class; their embeddings are averaged"""
    files: ClassVar = ("tokenizer",)
    ranges: ClassVar = {
        "text_width": (1, float("inf")), "text_depth": (1, float("inf")), "text_heads": (1, float("inf")),
        "text_mlp": (1, float("inf")), "text_length": (2, 4096), "vocabulary": (257, 10_000_000),
        "scale": (1e-6, 1e6), "pair_bias": (-1e6, 1e6),
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        are_templates = self.prompts and all(prompt.count("{}") == 1 for prompt in self.prompts)
        require(
            bool(are_templates), f"prompts are sentences with one {{}} for the name of a class, not {self.prompts}."
        )


@recipe(
    paper="LiT (arXiv:2111.07991) as in Dual PatchNorm's Table 4 (arXiv:2302.01327)",
    data="image-text pairs of the web",
    images=4_000_000_000,
    task="lit",
    model="B/32",
    trained=True,
    weights="an image tower, trained on JFT-4B in the paper",
    command="vitmods compare --from path/to/study --task lit --data pairs:FILE.jsonl --recipe lit",
    expected="zero-shot top-1 on ImageNet B/32 61.9 ± 0.12, with dpn 63.0 ± 0.09 (image towers of 220,000 steps)",
    not_stated="everything but steps and batch size: the values are those of big_vision's public towers; images are "
    "resized and flipped. The name of a class is its prompt, as in Dual PatchNorm",
)
def lit(steps: int = 55_000, *, batch_size: int = 16_384) -> Recipe:
    """LiT's training of a text tower for a frozen image tower: softmax over the batch, AdamW, cosine.

    Args:
        steps: of training; the warm-up takes 3 %, at least 100 steps of a training of 1,000 or more.
        batch_size: pairs per step; the learning rate stays.
    """
    return Recipe().with_(
        steps=steps,
        batch_size=batch_size,
        lr=1e-3,
        warmup_steps=max(round(0.03 * steps), min(100, steps // 10)),
        weight_decay=weight_decay_from_big_vision(0.01, 1e-3),
        clip_norm=1.0,
        crop="none",
        eval_crop=1.0,
        flip=0.5,
        prompts=("{}",),
    )


@recipe(
    data="some thousand image-text pairs",
    task="lit",
    trained=True,
    expected="none published; ours are in RESULTS.md",
)
def small_lit(epochs: int = 60, *, batch_size: int = 128) -> Recipe:
    """A small text tower on a few thousand pairs: width 128, four blocks, minutes on a CPU.

    Args:
        epochs: of training.
        batch_size: pairs per step; the learning rate stays.
    """
    return Recipe().with_(
        epochs=epochs,
        batch_size=batch_size,
        lr=1e-3,
        weight_decay=0.1,
        crop="none",
        eval_crop=1.0,
        flip=0.0,
        text_width=128,
        text_depth=4,
        text_heads=4,
        text_mlp=512,
        vocabulary=4000,
    )
