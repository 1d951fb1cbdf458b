"""A recipe's lengths on a number of images (epochs, steps, warm-up, batches), and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes.recipe import Recipe


def lr_at(length: Resolved, step: int) -> float:
    """Learning rate of optimizer step `step`, the first being 0.

    Of T steps, w of them warm-up, with p = (step - w) / (T - w) cut to [0, 1]:

    - `cosine`: min_lr + (lr - min_lr) (1 + cos(pi p)) / 2 (Loshchilov & Hutter, arXiv:1608.03983);
    - `linear`: min_lr + (lr - min_lr) (1 - p);
    - `poly`: min_lr + (lr - min_lr) (1 - p) ** power (Liu et al., arXiv:1506.04579);
    - `rsqrt`: lr / sqrt(1 + max(0, step - w) / timescale) (Zhai et al., arXiv:2106.04560);
    - `step`: lr / 10 ** (how many fractions of `step_at` of all T steps are behind it);
    - `epoch_cosine`: see `_epoch_cosine`;
    - `dino_cosine`: `cosine`, whose warm-up ends at step w - 1.

    The warm-up goes in a line from warmup_lr at step 0, the cool-down multiplies by (T - step) / cooldown_steps.
    """
    if length.schedule == "epoch_cosine":
        rate = _epoch_cosine(length, step)
    else:
        warmup = length.warmup_steps - (length.schedule == "dino_cosine")
        warmed_up = min(1.0, step / warmup if warmup > 0 else 1.0)
        rate = length.warmup_lr + (_decayed(length, step) - length.warmup_lr) * warmed_up
    if length.cooldown_steps:
        rate *= min(1.0, (length.steps - step) / length.cooldown_steps)
    return rate


def _decayed(length: Resolved, step: int) -> float:
    """The rate without warm-up and cool-down, of all schedules but `epoch_cosine`."""
    after = step - length.warmup_steps
    progress = min(max(after / max(length.steps - length.warmup_steps, 1e-9), 0.0), 1.0)
    match length.schedule:
        case "rsqrt":
            return length.lr / math.sqrt(1 + max(0.0, after) / length.rsqrt_timescale)
        case "step":
            return length.lr / math.pow(10, sum(step >= round(at * length.steps) for at in length.step_at))
        case "cosine" | "dino_cosine":
            fraction = 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            fraction = 1 - progress
        case _:
            fraction = (1 - progress) ** length.poly_power
    return length.min_lr + (length.lr - length.min_lr) * fraction


def _epoch_cosine(length: Resolved, step: int) -> float:
    """The rate of DeiT's training, the same throughout an epoch.

    Its cosine starts with the training, under the warm-up and not after it, and its scheduler is stepped after each
    epoch by the number of that epoch: epoch e has the rate of e - 1, and epochs 0 and 1 have the first.
    """
    number = max(0, step // length.steps_per_epoch - 1)
    warmup = length.warmup_steps / length.steps_per_epoch
    if number < warmup:
        return length.warmup_lr + number * (length.lr - length.warmup_lr) / warmup
    return length.min_lr + 0.5 * (length.lr - length.min_lr) * (1 + math.cos(math.pi * number / length.epochs))


LENGTHS, WARMUPS = ("epochs", "steps", "batch_size"), ("warmup_epochs", "warmup_steps")
REPLACES = {"epochs": "steps", "warmup_epochs": "warmup_steps", "warmup_steps": "warmup_epochs"}
LONGEST_WARMUP = 0.25
"""as a fraction of a training whose length is set and whose warm-up is not"""


def overridden(recipe: Recipe, fields: Mapping[str, Any], images: int = 0) -> Recipe:
    """Override fields of a recipe; epochs replace its steps, and a warm-up in one unit replaces that in the other.

    With another length, a warm-up that is not among the fields is shortened to LONGEST_WARMUP of the training. If the
    length is in steps and the warm-up in epochs, it keeps its fraction of the training.

    images: of training, to count the steps of an epoch; 0: unknown.
    """
    changes = dict[str, Any]()
    for name, value in fields.items():
        if value is not None or name not in (*LENGTHS, *WARMUPS):
            changes |= {REPLACES[name]: None, name: value} if name in REPLACES else {name: value}
    if changes.keys() & LENGTHS and not changes.keys() & WARMUPS:
        epochs, steps = changes.get("epochs", recipe.epochs), changes.get("steps", recipe.steps)
        per_epoch = images // max(1, changes.get("batch_size", recipe.batch_size))
        in_epochs, in_steps = recipe.schedule.warmup_epochs, recipe.schedule.warmup_steps
        if steps is not None and in_epochs is not None and recipe.steps is None:
            in_steps = round(in_epochs / recipe.epochs * steps)
            in_epochs = None
        if in_epochs is not None and steps is None:
            in_epochs = min(in_epochs, LONGEST_WARMUP * epochs)
        elif in_epochs is not None and steps is not None and per_epoch:
            in_epochs = min(in_epochs, LONGEST_WARMUP * steps / per_epoch)
        elif in_steps is not None and steps is not None:
            in_steps = min(in_steps, int(LONGEST_WARMUP * steps))
        elif in_steps is not None and per_epoch and in_steps > LONGEST_WARMUP * epochs * per_epoch:
            in_epochs, in_steps = LONGEST_WARMUP * epochs, None
        changes |= {"warmup_epochs": in_epochs, "warmup_steps": in_steps}
    return recipe.with_(**changes)


def half_cosine(start: float, end: float, step: int, steps: int) -> float:
    """The value at `step`, the first being 0, of half a cosine from `start` to `end` over `steps`."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / steps))


MOST_EVALUATIONS, FEW_EVALUATIONS = 100, 10
FEW_IMAGES = 50  # below which a training set is more likely a mistake than a set


@dataclass(frozen=True)
class Resolved:
    """A recipe's lengths in steps, and its learning rates for its batch size."""

    steps_per_epoch: int
    steps: int
    """optimizer steps of the whole training; they may end inside an epoch"""
    epochs: float
    """the same in epochs"""
    warmup_steps: float
    cooldown_steps: int
    batch_size: int
    accumulate: int
    part_size: int
    """images that are on the device at once"""
    images_seen: int
    """views; with `repeats`, so many of them are of one image"""
    schedule: Literal["cosine", "linear", "rsqrt", "epoch_cosine", "dino_cosine", "poly", "step"]
    rsqrt_timescale: int
    lr: float
    min_lr: float
    warmup_lr: float
    poly_power: float = 0.9
    step_at: tuple[float, ...] = ()

    def evaluate_every(self, epochs: int = 1, images: int = 1) -> int:
        """Steps between two evaluations of so many images: so many epochs; more if there were over 100 evaluations
        otherwise, or if more than half as many images were evaluated as trained on in more than ten."""
        most = min(MOST_EVALUATIONS, max(FEW_EVALUATIONS, self.images_seen // (2 * max(images, 1))))
        return max(epochs, math.ceil(self.epochs / most)) * self.steps_per_epoch

    def evaluations(self, epochs: int = 1, images: int = 1) -> int:
        """Return the number of evaluations of a trial, including the one at the end."""
        return math.ceil(self.steps / self.evaluate_every(epochs, images))


class TrainingSet(Protocol):
    """The part of a data set's interface that `resolve_on` reads."""

    @property
    def splits(self) -> Mapping[str, Sized]: ...
    def steps_per_epoch(self, batch_size: int) -> int: ...


def resolve(recipe: Recipe, images: int, steps_per_epoch: int | None = None) -> Resolved:
    """The recipe on a training set of so many images.

    An epoch has `images // batch_size` steps, with `repeats` too: it then has as many views of fewer images.

    steps_per_epoch: the data set's own; None: as above. UserError if the batch is larger than the set, or warm-up and
    cool-down leave nothing of the training.
    """
    if recipe.batch_size > images:
        more = f"A batch of {recipe.batch_size} images is more than the {images} of the training set"
        if images < FEW_IMAGES:
            raise UserError(
                f"{more}, and these are too few to learn from or to compare models on: add images, hundreds at least. "
                f"To only try the command, set batch_size to {images} or less."
            )
        raise UserError(f"{more}: set batch_size to {images} or less.")
    per_epoch = steps_per_epoch or images // recipe.batch_size
    steps = recipe.epochs * per_epoch if recipe.steps is None else recipe.steps
    warmup: float = min(0.1 * recipe.epochs, 5.0) * per_epoch if recipe.steps is None else 0.1 * recipe.steps
    if recipe.schedule.warmup_steps is not None:
        warmup = recipe.schedule.warmup_steps
    elif recipe.schedule.warmup_epochs is not None:
        warmup = recipe.schedule.warmup_epochs * per_epoch
    if warmup + recipe.schedule.cooldown_steps >= steps:
        raise UserError(
            f"{warmup:g} steps of warm-up and {recipe.schedule.cooldown_steps} of cool-down leave nothing of the "
            f"{steps} steps on {images} images in batches of {recipe.batch_size}: train longer, or set a shorter "
            "warm-up (warmup_epochs or warmup_steps) or cool-down (cooldown_steps)."
        )
    return Resolved(
        steps_per_epoch=per_epoch,
        steps=steps,
        epochs=steps / per_epoch,
        warmup_steps=warmup,
        cooldown_steps=recipe.schedule.cooldown_steps,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        part_size=recipe.part_size,
        images_seen=steps * recipe.batch_size,
        schedule=recipe.schedule.name,
        rsqrt_timescale=recipe.schedule.rsqrt_timescale,
        lr=recipe.optimizer.lr * recipe.lr_scale,
        min_lr=recipe.schedule.min_lr * recipe.lr_scale,
        warmup_lr=recipe.schedule.warmup_lr,
        poly_power=recipe.schedule.poly_power,
        step_at=recipe.schedule.step_at,
    )


def resolve_on(recipe: Recipe, dataset: TrainingSet) -> Resolved:
    """Resolve a recipe for a data set. Raises UserError as `resolve` does."""
    steps = dataset.steps_per_epoch(recipe.batch_size)  # first: it is what refuses a set without train
    return resolve(recipe, len(dataset.splits["train"]), steps)
