"""Classification of sequences: one class each, as of an image, by a model that reads tokens."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.data.records import printable
from vitmods.model.vit import ViT
from vitmods.recipes import Augment, Recipe
from vitmods.tasks.base import TASKS
from vitmods.tasks.classification import Classification
from vitmods.tasks.sequences.data import SequenceDataset, encode, load_sequences, padded_together
from vitmods.util.errors import UserError
from vitmods.util.limits import read_text

NO_IMAGES = Augment(crop="none", flip=0.0, eval_crop=1.0)
"""settings of a recipe for images, which sequences do not use"""


@TASKS.register("sequence_classification")
@dataclass(unsafe_hash=True)
class SequenceClassification(Classification):
    """Mean cross-entropy over sequences; evaluated by top-1 accuracy, as `Classification`.

    Batches have tokens int64 (B, T), 0 being padding.
    """

    name = "sequence_classification"
    title = "one class per sequence of tokens"
    inputs = "tokens"
    hub_tag = "text-classification"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's loss and label smoothing. UserError where the recipe augments images."""
        if recipe.augment != NO_IMAGES:
            ignored = [name for name, value in vars(recipe.augment).items() if value != getattr(NO_IMAGES, name)]
            raise UserError(
                f"Sequences are read as they are, and the recipe sets {', '.join(ignored)} of images: leave that out "
                "(--recipe listops, or plain)."
            )
        return super().from_recipe(recipe)

    @classmethod
    def fitted(cls, recipe: Recipe) -> Recipe:
        """Without augmentation of images."""
        return super().fitted(recipe).with_(augment=NO_IMAGES)

    def load_data(self, spec: str, **options: Any) -> SequenceDataset:
        """Read sequences, as they are. UserError for `unreadable=skip`: nothing of a sequence can be left out."""
        if options.pop("unreadable", "stop") == "skip":
            raise UserError("All sequences are read, or an error names the unreadable one: leave unreadable=skip out.")
        for name in ("augment", "cache_dir"):
            options.pop(name, None)
        return load_sequences(spec, target=self.target, **options)

    def read_files(self, paths: Sequence[Path], data: Mapping[str, Any], longest: int) -> dict[str, Tensor]:
        """A sequence for each line of text files that is not empty, named FILE:NUMBER."""
        if not data.get("vocabulary"):
            raise UserError("The tokens of this model are unknown: give the folder of its trial, which lists them.")
        sequences: dict[str, Tensor] = {}
        for path in paths:
            try:
                lines = read_text(path).splitlines()
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{printable(str(path))} is not a text file with one sequence a line: {error}"
                ) from error
            for number, line in enumerate(lines, 1):
                if line.strip():
                    name = f"{printable(str(path))}:{number}"
                    sequences[name] = torch.from_numpy(encode(line, tuple(data["vocabulary"]), name))
        if not sequences:
            raise UserError("The files do not contain sequences: give text files with one sequence a line.")
        if long := [name for name, tokens in sequences.items() if len(tokens) > longest]:
            warnings.warn(f"{len(long)} sequences are cut to {longest} tokens: {', '.join(long[:5])}", stacklevel=3)
        return {name: tokens[:longest] for name, tokens in sequences.items()}

    def stack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Filled up with padding to the longest."""
        return padded_together([tokens.numpy() for tokens in inputs])

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The backbone. UserError for a ViT that reads images."""
        if isinstance(backbone, ViT) and not backbone.vit_config.reads_tokens:
            raise UserError("This model reads images, and the task needs sequences: use a base such as LRA-64.")
        return backbone

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """The longest sequences of `shape` (tokens in the vocabulary, 1, length), classes in turn."""
        vocabulary, _, length = shape
        tokens = torch.randint(1, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
        return Batch(tokens, torch.arange(count) % classes, torch.arange(count))
