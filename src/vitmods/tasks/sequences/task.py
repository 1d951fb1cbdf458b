"""Classification of sequences: one class each, as of an image, by a model that reads tokens."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from vitmods.data.batch import Batch
from vitmods.model.vit import ViT
from vitmods.recipes import Augment, Recipe
from vitmods.tasks.base import TASKS
from vitmods.tasks.classification import Classification
from vitmods.tasks.sequences.data import SequenceDataset, load_sequences, refuse_skipping
from vitmods.util.errors import UserError

NO_IMAGES = Augment(crop="none", flip=0.0, eval_crop=1.0)
"""What a recipe says of images that there are not."""


@TASKS.register("sequence_classification")
@dataclass(frozen=True)
class SequenceClassification(Classification):
    """Mean cross-entropy over sequences; evaluated by top-1 accuracy, as `Classification`.

    Batches have tokens int64 (B, T), 0 being padding.
    """

    name = "sequence_classification"
    title = "one class a sequence of tokens"
    inputs = "tokens"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's loss and label smoothing. UserError where the recipe augments images."""
        if recipe.augment != NO_IMAGES:
            given = [name for name, value in vars(recipe.augment).items() if value != getattr(NO_IMAGES, name)]
            raise UserError(
                f"Sequences are read as they are, and the recipe sets {', '.join(given)} of images: leave that out "
                "(--recipe listops, or plain)."
            )
        return super().from_recipe(recipe)

    @classmethod
    def fitted(cls, recipe: Recipe) -> Recipe:
        """Without augmentation of images."""
        return recipe.with_(augment=NO_IMAGES)

    @classmethod
    def load_data(cls, spec: str, **options: Any) -> SequenceDataset:
        """Read sequences, as they are. UserError for `unreadable=skip`: nothing of a sequence can be left out."""
        refuse_skipping(options.pop("unreadable", "stop"))
        for name in ("augment", "cache_dir"):
            options.pop(name, None)
        return load_sequences(spec, target=cls.target, **options)

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The backbone. UserError for a ViT that reads images."""
        if isinstance(backbone, ViT) and not backbone.vit_config.reads_tokens:
            raise UserError("This model reads images, and the task has sequences: take a base such as LRA-64.")
        return backbone

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """The longest sequences of `shape` (tokens in the vocabulary, 1, length), classes in turn."""
        vocabulary, _, length = shape
        tokens = torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
        return Batch(tokens, torch.arange(count) % classes, torch.arange(count))
