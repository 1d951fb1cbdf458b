"""LiT (Zhai et al., 2022, arXiv:2111.07991): texts are embedded where their images are, by a frozen image tower."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitmods.data.augment import Ints
from vitmods.data.batch import Batch
from vitmods.data.dataset import ImageDataset, Split
from vitmods.data.rng import Stream, uniform
from vitmods.data.splits import hashes
from vitmods.recipes import Recipe
from vitmods.tasks.base import TASKS, Measured, Splits, Task, noise
from vitmods.tasks.classification import sigmoid_cross_entropy
from vitmods.tasks.lit.model import LitModel, learn_tokenizer, normalized, read_tokenizer
from vitmods.tasks.lit.recipes import LitPart
from vitmods.tasks.lit.sources import Captions, key_of
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError

RECALLS = (1, 5, 10)
CHUNK = 1024  # images or texts at a time


def softmax_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Mean cross-entropy of each image's text among all texts, and of each text's image; (B, D) and (B, D)."""
    logits, pairs = images @ texts.T * scale, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Binary cross-entropy of all pairs, summed over texts (SigLIP, Zhai et al., 2023, arXiv:2303.15343)."""
    logits = images @ texts.T * scale + bias
    return sigmoid_cross_entropy(logits, torch.eye(len(images), dtype=logits.dtype, device=logits.device)).mean()


@dataclass(frozen=True)
class Pairs(ImageDataset):
    """Image-text pairs: a batch of training has a caption of each image, drawn for the epoch; others have all. encode:
    makes tokens of captions while a batch is prepared."""

    encode: Callable[[list[str]], Tensor] | None = None

    def encoded(self, encode: Callable[[list[str]], Tensor]) -> Self:
        """With tokens in place of captions."""
        return replace(self, encode=encode)

    @classmethod
    def of(cls, dataset: ImageDataset, prompts: tuple[str, ...]) -> Self:
        """With the prompts around names of classes, and captions of equal images."""
        values = {field.name: getattr(dataset, field.name) for field in fields(dataset)}
        splits = {name: _with_texts(split, prompts) for name, split in dataset.splits.items()}
        return cls(**values | {"splits": splits})

    def _train_batch(self, views: Ints, seed: int, epoch: int, number: int) -> Batch:
        batch = super()._train_batch(views, seed, epoch, number)
        draws = uniform(seed, Stream.CAPTION, epoch, self._own(views)).tolist()
        texts = [item.texts[int(u * len(item.texts))] for item, u in zip(batch.targets, draws, strict=True)]
        return replace(batch, targets=texts if self.encode is None else self.encode(texts))

    def _targets(self, split: str, index: Ints) -> list[Captions]:
        annotations = self.splits[split].annotations or ()
        return [annotations[i] for i in index.tolist()]


def _with_texts(split: Split, prompts: tuple[str, ...]) -> Split:
    texts_of: dict[Any, dict[str, None]] = {}
    keys, captions = hashes(split.store.index.digests).tolist(), list[Captions]()
    for key, item in zip(keys, split.annotations or (), strict=True):
        if item.is_class:
            item = replace(item, texts=_prompted(item.texts, prompts))
        else:
            texts_of.setdefault(key, {}).update(dict.fromkeys(item.texts))
        captions.append(item)
    annotations = (replace(item, of_copies=tuple(texts_of.get(key, ()))) for key, item in zip(keys, captions))
    return replace(split, annotations=tuple(annotations))


def _prompted(names: Iterable[str], prompts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prompt.format(name) for name in names for prompt in prompts)


class _Ranks(NamedTuple):
    """The rank of the first correct text of each image and of the first correct image of each text, from 1; the first
    text of each image; and the cross-entropy of its nearest correct text."""

    of_images: Tensor
    of_texts: Tensor
    first: Tensor
    losses: Tensor


def ranks(images: Tensor, texts: Tensor, correct: Tensor, scale: float = 1.0) -> _Ranks:
    """Rank texts (M, D) for images (N, D) and images for texts by their product; equal ones count as before.

    correct: pairs (P, 2) of an image and a correct text of it.
    """
    of_images, first, losses = [], [], []
    nearest_image = texts.new_full((len(texts),), -torch.inf)
    of_texts = torch.ones(len(texts), dtype=torch.int64, device=texts.device)

    def chunks() -> Iterable[tuple[Tensor, Tensor]]:
        for start in range(0, len(images), CHUNK):
            similarity = images[start : start + CHUNK] @ texts.T
            rows, columns = correct[(correct[:, 0] >= start) & (correct[:, 0] < start + CHUNK)].T
            is_correct = torch.zeros_like(similarity, dtype=torch.bool)
            is_correct[rows - start, columns] = True
            yield similarity, is_correct

    for similarity, is_correct in chunks():
        right = similarity.masked_fill(~is_correct, -torch.inf)
        nearest = right.amax(1)
        of_images.append(((similarity >= nearest[:, None]) & ~is_correct).sum(1) + 1)
        first.append(similarity.argmax(1))
        losses.append((similarity * scale).logsumexp(1) - nearest * scale)
        nearest_image = torch.maximum(nearest_image, right.amax(0))
    for similarity, is_correct in chunks():
        of_texts += ((similarity >= nearest_image) & ~is_correct).sum(0)
    return _Ranks(torch.cat(of_images), of_texts, torch.cat(first), torch.cat(losses))


@TASKS.register("lit")
@dataclass(frozen=True)
class Lit(Task):
    """Evaluated by retrieval among the captions of a split: recall of a correct text among the first k of an image, and
    of a correct image among the first k of a text. On images with classes the texts are the classes: `zero_shot`.

    Several captions of an image are all correct, as are those of its exact copies; captions that are equal except for
    case and white space are one text.
    """

    name, title = "lit", "image-text pairs: texts for a frozen image tower (LiT)"
    target = "text"
    metrics = (
        *(Metric(f"text_r{k}", f"image-to-text R@{k}", "") for k in RECALLS),
        *(Metric(f"image_r{k}", f"text-to-image R@{k}", "") for k in RECALLS),
        Metric("zero_shot", "zero-shot top-1", ""),
    )
    recipe_part = LitPart
    libraries = ("tokenizers",)
    usual_recipe = "small_lit"
    uses_head = False
    divides = False
    whole_batch = True
    reads_any_classes = True
    unread = ("train", "mixup", "cutmix", "label_smoothing", "head_bias")

    part: LitPart = field(default_factory=LitPart)
    loss_name: str = "softmax"

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """With the recipe's part and loss. UserError for a loss of classes, or settings that a frozen tower ignores."""
        part, frozen = recipe.part(LitPart), {**vars(recipe.model), "layer_decay": recipe.optimizer.layer_decay}
        if recipe.loss.name == "bce":
            raise UserError("The task lit has the losses softmax and sigmoid: set one of them.")
        ignored = [name for name in ("dropout", "drop_path", "patch_drop", "layer_decay") if frozen[name]]
        if part.frozen_image and ignored:
            raise UserError(f"The image tower is frozen, which ignores {', '.join(ignored)}: leave them out.")
        return cls(part, recipe.loss.name)

    @property
    def needs_trained_backbone(self) -> bool:
        """If the image tower is frozen."""
        return self.part.frozen_image

    def load_data(self, spec: str, **options: Any) -> Pairs:
        """Read image-text pairs, or images with classes, whose names go into the prompts."""
        return Pairs.of(super().load_data(spec, **options), self.part.prompts)

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The backbone with a text tower. Its tokenizer comes with `fit`, or from trained weights."""
        return LitModel(backbone, self.part, self.loss_name == "sigmoid")

    def check_metric(self, name: str, split: Any) -> None:
        """Raise UserError for zero-shot accuracy on images with captions."""
        if name == "zero_shot" and not all(captions.is_class for captions in split.annotations):
            raise UserError(
                "zero_shot needs test images with classes, and these have captions: add zero_shot=FOLDER to the "
                "address of the pairs, or compare by text_r5."
            )

    def fit(self, model: nn.Module, dataset: Any) -> None:
        """Learn the tokenizer from the captions of training, or read its file."""
        assert isinstance(model, LitModel)
        captions = dataset.splits["train"].annotations
        if self.part.tokenizer is not None:
            model.text.tokenizer = read_tokenizer(self.part.tokenizer, self.part.vocabulary)
        else:
            texts = (text for item in captions for text in item.texts)
            model.text.tokenizer = learn_tokenizer(texts, self.part.vocabulary)

    def training_data(self, model: nn.Module, dataset: Any) -> Any:
        """With tokens in place of captions."""
        assert isinstance(model, LitModel)
        return dataset.encoded(model.text.encode)

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss over the batch of all processes, whose targets are tokens; `text_r1` and `image_r1` among its
        pairs."""
        images, texts, scale, bias = model(batch.inputs, batch.targets)
        images, texts = self.gather(images), self.gather(texts)
        loss = softmax_loss(images, texts, scale) if bias is None else sigmoid_loss(images, texts, scale, bias)
        with torch.no_grad():
            similarity, pairs = images @ texts.T, torch.arange(len(images), device=images.device)
            hits = {
                f"{name}_r1": (s.argmax(1) == pairs).float().mean()
                for name, s in (("text", similarity), ("image", similarity.T))
            }
        return loss, {**hits, "scale": scale.detach().mean()}

    @torch.inference_mode()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """Recalls as means over images: of a text among the first k, and of the image's texts the fraction that find a
        correct image among the first k. `loss`: the cross-entropy of the nearest correct text among all."""
        assert isinstance(model, LitModel)
        embedded, captions = [], list[Captions]()
        for batch in batches:
            embedded.append(model.embed_images(batch.inputs))
            captions += batch.targets
        if not captions:
            raise UserError("The split that is to be evaluated is empty.")
        images = torch.cat(embedded)
        texts: dict[tuple[str, ...], tuple[str, ...]] = {}
        for item in captions:
            for key, entry in zip(item.keys, item.candidates, strict=True):
                texts.setdefault(key, entry)
        for names in captions[0].classes:  # also of classes without an image here
            texts.setdefault(prompted := _prompted(names, self.part.prompts), prompted)
        number = {key: i for i, key in enumerate(texts)}
        keys = [{*item.keys, *map(key_of, item.of_copies)} for item in captions]
        candidates = [sorted(number[key] for key in of_image if key in number) for of_image in keys]
        correct = torch.tensor(
            [(i, text) for i, right in enumerate(candidates) for text in right], device=images.device
        )
        ranked = ranks(images, self._embed(model, list(texts.values())), correct, float(model.scale()))
        of_images, of_texts = ranked.of_images.cpu().numpy(), ranked.of_texts.cpu().numpy()
        per_image = {f"text_r{k}": of_images <= k for k in RECALLS}
        per_image |= {f"image_r{k}": np.array([(of_texts[right] <= k).mean() for right in candidates]) for k in RECALLS}
        if all(item.is_class for item in captions):
            per_image |= {"zero_shot": of_images <= 1, "predicted": ranked.first.int().cpu().numpy()}
        metrics = {name: float(values.mean()) for name, values in per_image.items() if name != "predicted"}
        return Measured({**metrics, "loss": float(ranked.losses.mean())}, per_image)

    @staticmethod
    def _embed(model: LitModel, candidates: list[tuple[str, ...]]) -> Tensor:
        """The normalized mean embedding of each entry's texts."""
        texts = [text for entry in candidates for text in entry]
        owner = torch.tensor([i for i, entry in enumerate(candidates) for _ in entry], device=model.log_scale.device)
        tokens = model.text.encode(texts)
        if equal := len(set(texts)) - len(tokens.unique(dim=0)):
            message = f"{equal} texts of {len(set(texts))} have the tokens of another: increase text_length."
            warnings.warn(message, stacklevel=2)
        embeddings = torch.cat([model.embed_texts(part.to(owner.device)) for part in tokens.split(CHUNK)])
        sums = embeddings.new_zeros(len(candidates), embeddings.shape[1]).index_add_(0, owner, embeddings)
        return normalized(sums)

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """Rank the k texts with the most images first, for every image, and one image of each first for every text."""
        scores = dict.fromkeys((metric.name for metric in cls.metrics), 0.0)
        total = sum(map(len, splits))
        for split in splits:
            counts = Counter(key for item in split.annotations or () for key in set(item.keys))
            largest = [count for _, count in counts.most_common(max(RECALLS))]
            for k in RECALLS:
                share = min(1.0, sum(largest[:k]) / len(split)) * len(split) / total
                scores[f"text_r{k}"] += share
                scores[f"image_r{k}"] += share
            scores["zero_shot"] = scores["text_r1"]
        return scores

    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """Texts of the full length."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(2, self.part.vocabulary, (count, self.part.text_length), generator=generator)
        return Batch(noise(count, shape), tokens, torch.arange(count))
