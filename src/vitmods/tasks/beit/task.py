"""BeiT (Bao et al., 2022, arXiv:2106.08254): predict the codes of masked patches from the visible ones."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.data.batch import Batch
from vitmods.recipes import Recipe
from vitmods.tasks.base import TASKS, Measured, Task, noise, on_cpu
from vitmods.tasks.beit.masks import draw_masks, evaluation_seeds, masked_view
from vitmods.tasks.beit.model import BeitModel
from vitmods.tasks.beit.recipes import BeitPart
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError


@TASKS.register("beit")
class Beit(Task):
    """Evaluated by k-NN on the backbone's features where images have classes.

    `code_top1` is the fraction of masked patches whose code is predicted. It is too high for a stem that leaks masked
    pixels, and depends on the patch size: between stems, compare k-NN, or accuracy after fine-tuning.
    """

    name, title = "beit", "without labels: predict codes of masked patches (BeiT)"
    target = "any"
    metrics = (Metric("code_top1", "accuracy of codes of masked patches", ""),)
    compared_by = "knn"
    recipe_part = BeitPart
    libraries = ("scikit-learn",)
    usual_recipe = "beit_base"
    small_recipe = "beit_small"
    uses_head = False
    divides = False
    joint = staticmethod(masked_view)
    unread = (
        "randaugment", "randaugment_space", "randaugment_noise", "erasing", "mixup", "cutmix", "loss",
        "label_smoothing", "head_bias", "patch_drop",
    )  # fmt: skip

    def __init__(self, part: BeitPart | None = None) -> None:
        self.part = part or BeitPart()

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's part."""
        return cls(recipe.part(BeitPart))

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The backbone with a mask token, a head over codes, and the codes. UserError if it is not a vitmods ViT."""
        return BeitModel(backbone, self.part)

    def begin(self, model: nn.Module) -> None:
        assert isinstance(model, BeitModel)
        self._model = model

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean cross-entropy over the masked patches of all processes, and `code_top1`."""
        _, seeds = batch.targets
        masks = draw_masks(self.part, self._model.grid, seeds, batch.inputs.device)
        codes = self._model.codes(batch.inputs).flatten()[masks.masked]
        logits = model(batch.inputs, masks).float()
        masked = self.mean(logits.new_full((), len(codes)))  # torch.tensor would wait for a GPU
        right = (logits.detach().argmax(dim=-1) == codes).sum() / masked
        return F.cross_entropy(logits, codes, reduction="sum") / masked, {"code_top1": right}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """`code_top1` and `loss` are means over images of those of their masked patches; each image has a mask of its
        own, always the same."""
        assert isinstance(model, BeitModel)
        columns = dict[str, list[Tensor]]()
        for batch in batches:
            masks = draw_masks(self.part, model.grid, evaluation_seeds(batch.index.cpu().numpy()), batch.inputs.device)
            codes = model.codes(batch.inputs).flatten()[masks.masked]
            logits = model(batch.inputs, masks).float()
            image = masks.masked // masks.mask.shape[1]
            counts = masks.mask.sum(dim=1)
            scores = {"code_top1": (logits.argmax(dim=-1) == codes).float()}
            scores["loss"] = F.cross_entropy(logits, codes, reduction="none")
            for name, values in scores.items():
                sums = values.new_zeros(len(batch)).index_add_(0, image, values)
                columns.setdefault(name, []).append(sums / counts)
        if not columns:
            raise UserError("The split that is to be evaluated is empty.")
        per_image = on_cpu(columns)
        return Measured({name: float(values.mean()) for name, values in per_image.items()}, per_image)

    def warnings(self, model: nn.Module) -> Iterator[str]:
        """Warn of a stem through which masked pixels reach other tokens."""
        if isinstance(model, BeitModel) and model.leaks:
            yield (
                "its stem leaks: in training, pixels of a masked patch change other tokens, so the network can see "
                "what it should predict, and its code_top1 does not compare with others'."
            )

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Images of noise, and seeds of masks."""
        index = torch.arange(count)
        return Batch(noise(count, shape), (index % max(classes, 1), evaluation_seeds(np.arange(count))), index)
