"""Visual prompts: learned tokens beside those of the image, for trained weights that stay as they are."""

from dataclasses import dataclass

from vitmods.changes.base import Change
from vitmods.changes.insertions import Insertion, Parts, PromptTokens
from vitmods.model.config import ViTConfig
from vitmods.model.slots import Slot
from vitmods.util.errors import NeedsReading, UserError


@dataclass(frozen=True)
class Prompts(Change):
    """``count`` learned tokens beside those of the image, which no head reads (Jia et al., 2022, section 3.2). An arm
    of a study trains them and the head, and freezes the other weights.

    By default they enter before the first block and leave after the last (shallow). With ``deep`` each block has its
    own, which take the place of what the last block made of its.

    A vitmods ViT with prompts gets new ones. Models of other libraries take deep ones alone.
    """

    name = "prompts"
    title = "Visual prompt tuning"
    paper = "Jia et al.: Visual Prompt Tuning. ECCV 2022"
    url = "https://arxiv.org/abs/2203.12119"
    summary = "Adds learned tokens beside those of the image; of trained weights, only they and the head are trained."
    cost = "width parameters a prompt (deep: a block); as many multiply-adds as for another patch each"
    published = "deep prompts are above full fine-tuning of ViT-B/16 on 20 of 24 tasks, shallow ones on fewer (Table 1)"
    words = ("vpt", "prompt tuning")
    trains = "prompts"
    fills = frozenset({Slot.PROMPTS})

    count: int = 10
    deep: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"prompts(count=...) is a whole number, at least 1, got {self.count}.")

    def edit(self, config: ViTConfig) -> ViTConfig:
        return config.with_(prompts=self.count, prompts_deep=self.deep)

    def drops(self, old: ViTConfig, new: ViTConfig) -> tuple[str, ...]:
        return ("prompts",) if old.prompts else ()

    def insertions(self, parts: Parts) -> list[Insertion]:
        if not self.deep:
            raise NeedsReading(
                f"'{self}' would show its tokens in what lies between the blocks of a model of another library: write "
                "prompts(deep=true)."
            )
        return [PromptTokens(parts.blocks, self.count)]
