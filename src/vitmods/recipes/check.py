"""What the values of a recipe may be."""

from __future__ import annotations

import math
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from vitmods.finetune.roles import chosen_roles
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes.recipe import Augment, Optimizer, Recipe, Segmentation

_RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, math.inf),
    "steps": (1, math.inf),
    "batch_size": (1, math.inf),
    "accumulate": (1, math.inf),
    "lr_batch": (1, math.inf),
    "layer_decay": (1e-6, 1),
    "beta1": (0, 0.999999),
    "beta2": (0, 0.999999),
    "momentum": (0, 0.999999),
    "adam_eps": (0, 1),
    "rsqrt_timescale": (1, math.inf),
    "fpn_channels": (1, math.inf),
    "clip_norm": (1e-12, math.inf),
    "ema": (0, 0.9999999),
    "dropout": (0, 0.999999),
    "drop_path": (0, 0.999999),
    "patch_drop": (0, 0.999999),
    "head_bias": (-math.inf, math.inf),
    "label_smoothing": (0, 1),
    "flip": (0, 1),
    "repeats": (1, math.inf),
    "erasing": (0, 1),
    "most_of_class": (0.01, 1),
    "photometric": (0, 1),
    "poly_power": (1e-6, math.inf),
    "window_stride": (1, math.inf),
    "eval_crop": (0.05, 1),
}
"""of numbers that may be something else than at least 0"""
_STRONGEST = {"torchvision": 30, "big_vision": 30, "timm": 10}
"""magnitudes up to which an operation of a space is defined"""


def check_fields(part: Any) -> None:
    """Raise UserError, naming the field, if a number is out of its range or a word is none of its choices."""
    for field, kind in _hints(part.__class__).items():  # to mypy a type(part) has no hash
        value, kinds = getattr(part, field), get_args(kind) or (kind,)
        name = type(part).__name__.lower() if field == "name" else field
        if value is None and NoneType in kinds:
            continue
        (inner,) = (one for one in (kinds if NoneType in kinds else (kind,)) if one is not NoneType)
        if get_origin(inner) is Literal and value not in get_args(inner):
            raise UserError(f"recipe: {name} must be one of {', '.join(get_args(inner))}, not {value!r}.")
        if inner in (int, float):
            _check_number(name, value, inner)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check_number(name: str, value: Any, kind: type) -> None:
    low, high = _RANGES.get(name, (0, math.inf))
    if not isinstance(value, int | float) or not low <= value <= high or not math.isfinite(value):
        bound = f"at least {low:g} and finite" if high == math.inf else f"from {low:g} to {high:g}"
        raise UserError(f"recipe: {name} must be {bound}, not {value!r}.")
    if kind is int and not isinstance(value, int):
        raise UserError(f"recipe: {name} must be a whole number, not {value!r}.")


def check_augment(augment: Augment) -> None:
    """Raise UserError where crops, mean and std, or RandAugment's values are none."""
    for name in ("crop_scale", "crop_ratio", "resize_range", "randaugment"):
        if (pair := getattr(augment, name)) is not None and len(pair) != 2:
            raise UserError(f"recipe: {name} is two numbers, not {pair}.")
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(augment, name)
        if not 0 < low <= high:
            raise UserError(f"recipe: {name} must be two increasing numbers above 0, not {getattr(augment, name)}.")
    if augment.crop_scale[1] > 1:
        raise UserError(f"recipe: crop_scale is a fraction of the image, at most 1, not {augment.crop_scale}.")
    if augment.resize_range is not None and not 0 < augment.resize_range[0] <= augment.resize_range[1]:
        raise UserError(f"recipe: resize_range must be two increasing numbers above 0, not {augment.resize_range}.")
    for name in ("mean", "std"):
        if len(getattr(augment, name)) not in (1, 3):
            raise UserError(f"recipe: {name} must be one number, or three for RGB, not {getattr(augment, name)}.")
    if min(augment.std) <= 0:
        raise UserError(f"recipe: std must be above 0, not {augment.std}.")
    space, drawn = augment.randaugment_space, augment.randaugment
    if drawn is not None and not (drawn[0] >= 1 and 0 <= drawn[1] <= _STRONGEST[space]):
        raise UserError(
            f"recipe: randaugment is (operations >= 1, magnitude 0 to {_STRONGEST[space]}) with the operations of "
            f"{space}, not {drawn}."
        )
    if drawn is not None and augment.randaugment_noise > 0 and space != "timm":
        raise UserError(
            "recipe: randaugment_noise is for the operations of timm alone: set it to 0, or randaugment_space to timm."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError where the optimizer cannot store its moment so."""
    if optimizer.name == "lamb" and optimizer.moment == "bfloat16":
        raise UserError("recipe: moment=bfloat16 is for adamw and sgd; LAMB keeps its means in float32.")


def check_segmentation(segmentation: Segmentation) -> None:
    """Raise UserError where there are no scales to evaluate at."""
    scales = segmentation.eval_scales
    if not scales or min(scales) <= 0:
        raise UserError(f"recipe: eval_scales must be numbers above 0, as 0.75 1.0 1.25, not {scales}.")


def check_recipe(recipe: Recipe) -> None:
    """Raise UserError where nothing is trained of that name, or lengths and rates do not go together."""
    try:
        chosen_roles(recipe.train)
    except UserError as error:
        raise UserError(f"recipe: train: {error}") from None
    _check_lengths(recipe)
    _check_rates(recipe)


def _check_lengths(recipe: Recipe) -> None:
    schedule = recipe.schedule
    if recipe.steps is None and schedule.warmup_epochs is not None and schedule.warmup_epochs >= recipe.epochs:
        raise UserError(
            f"recipe: warmup_epochs={schedule.warmup_epochs:g} leaves nothing of epochs={recipe.epochs}; give a "
            "smaller warmup_epochs, or none for a tenth of the epochs."
        )
    if schedule.warmup_steps is not None and schedule.warmup_epochs is not None:
        raise UserError("recipe: warmup_epochs and warmup_steps say the same thing: give one of them.")
    if recipe.steps is not None and (schedule.warmup_steps or 0) + schedule.cooldown_steps >= recipe.steps:
        raise UserError(
            f"recipe: warmup_steps={schedule.warmup_steps or 0} and cooldown_steps={schedule.cooldown_steps} leave "
            f"nothing of steps={recipe.steps}: give fewer of them."
        )


def _check_rates(recipe: Recipe) -> None:
    schedule, lr = recipe.schedule, recipe.optimizer.lr
    if not all(0 < at < 1 for at in schedule.step_at) or list(schedule.step_at) != sorted(schedule.step_at):
        raise UserError(f"recipe: step_at must be increasing fractions between 0 and 1, not {schedule.step_at}.")
    if schedule.name == "step" and schedule.min_lr > 0:
        raise UserError(
            "recipe: the rate of step falls to a tenth at each of step_at and has no min_lr: leave it at 0."
        )
    if schedule.name == "rsqrt" and schedule.min_lr > 0:
        raise UserError("recipe: the rate of rsqrt falls without end and has no min_lr; cooldown_steps brings it to 0.")
    warms_up = schedule.warmup_epochs != 0 and schedule.warmup_steps != 0
    if schedule.name == "epoch_cosine" and warms_up and schedule.warmup_lr == 0:
        raise UserError(
            "recipe: epoch_cosine trains two epochs at warmup_lr, which is 0: give one, as DeiT's 1e-6, or "
            "warmup_epochs=0."
        )
    if schedule.min_lr > lr:
        raise UserError(f"recipe: min_lr={schedule.min_lr:g} is above lr={lr:g}.")
    peak = lr * recipe.lr_scale
    if schedule.warmup_lr > peak:
        lr_batch = recipe.optimizer.lr_batch
        scaled = "" if lr_batch is None else f" * batch_size / lr_batch = {peak:g}"
        raise UserError(f"recipe: warmup_lr={schedule.warmup_lr:g} is above lr={lr:g}{scaled}.")
