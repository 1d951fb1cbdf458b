"""What the values of a recipe may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vitmods.finetune.roles import chosen_roles
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.recipes.recipe import Recipe

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("epochs", 1, math.inf),
    ("steps", 1, math.inf),
    ("batch_size", 1, math.inf),
    ("accumulate", 1, math.inf),
    ("lr", 0, math.inf),
    ("lr_batch", 1, math.inf),
    ("layer_decay", 1e-6, 1),
    ("weight_decay", 0, math.inf),
    ("beta1", 0, 0.999999),
    ("beta2", 0, 0.999999),
    ("momentum", 0, 0.999999),
    ("adam_eps", 0, 1),
    ("warmup_epochs", 0, math.inf),
    ("warmup_steps", 0, math.inf),
    ("warmup_lr", 0, math.inf),
    ("min_lr", 0, math.inf),
    ("rsqrt_timescale", 1, math.inf),
    ("cooldown_steps", 0, math.inf),
    ("clip_norm", 1e-12, math.inf),
    ("ema", 0, 0.9999999),
    ("dropout", 0, 0.999999),
    ("drop_path", 0, 0.999999),
    ("label_smoothing", 0, 1),
    ("flip", 0, 1),
    ("repeats", 1, math.inf),
    ("randaugment_noise", 0, math.inf),
    ("erasing", 0, 1),
    ("mixup", 0, math.inf),
    ("cutmix", 0, math.inf),
    ("eval_crop", 0.05, 1),
)
_WHOLE = (
    "epochs",
    "steps",
    "batch_size",
    "accumulate",
    "lr_batch",
    "warmup_steps",
    "rsqrt_timescale",
    "cooldown_steps",
    "repeats",
)
_CHOICES = {
    "optimizer": ("adamw", "sgd", "lamb"),
    "moment": ("float32", "bfloat16"),
    "schedule": ("cosine", "linear", "rsqrt", "epoch_cosine"),
    "drop_path_shape": ("linear", "constant", None),
    "init": ("timm", "big_vision", None),
    "loss": ("softmax", "sigmoid", "bce"),
    "crop": ("none", "pad", "random_resized", "inception"),
    "resample": ("bicubic", "bilinear", "big_vision"),
    "randaugment_space": ("torchvision", "big_vision", "timm"),
    "precision": ("32-true", "bf16-mixed"),
}
_STRONGEST = {"torchvision": 30, "big_vision": 30, "timm": 10}
"""magnitudes up to which an operation of a space is defined"""


def check(recipe: Recipe) -> None:
    """Raise UserError, naming the field, if a value is out of its range or two do not go together."""
    for name, low, high in _RANGES:
        _check_range(name, getattr(recipe, name), low, high)
    for name in _WHOLE:
        if not isinstance(getattr(recipe, name), int | None):
            raise UserError(f"recipe: {name} must be a whole number, not {getattr(recipe, name)!r}.")
    for name, choices in _CHOICES.items():
        if getattr(recipe, name) not in choices:
            known = ", ".join(filter(None, choices))
            raise UserError(f"recipe: {name} must be one of {known}, not {getattr(recipe, name)!r}.")
    try:
        chosen_roles(recipe.train)
    except UserError as error:
        raise UserError(f"recipe: train: {error}") from None
    _check_images(recipe)
    _check_schedule(recipe)


def _check_images(recipe: Recipe) -> None:
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(recipe, name)
        if not 0 < low <= high:
            raise UserError(f"recipe: {name} must be two increasing numbers above 0, not {getattr(recipe, name)}.")
    if recipe.crop_scale[1] > 1:
        raise UserError(f"recipe: crop_scale is a fraction of the image, at most 1, not {recipe.crop_scale}.")
    for name in ("mean", "std"):
        if len(getattr(recipe, name)) not in (1, 3):
            raise UserError(f"recipe: {name} must be one number, or three for RGB, not {getattr(recipe, name)}.")
    if min(recipe.std) <= 0:
        raise UserError(f"recipe: std must be above 0, not {recipe.std}.")
    strongest = _STRONGEST[recipe.randaugment_space]
    if recipe.randaugment is not None and not (recipe.randaugment[0] >= 1 and 0 <= recipe.randaugment[1] <= strongest):
        raise UserError(
            f"recipe: randaugment is (operations >= 1, magnitude 0 to {strongest}) with the operations of "
            f"{recipe.randaugment_space}, not {recipe.randaugment}."
        )
    if recipe.randaugment is not None and recipe.randaugment_noise > 0 and recipe.randaugment_space != "timm":
        raise UserError(
            "recipe: randaugment_noise is for the operations of timm alone: set it to 0, or randaugment_space to timm."
        )


def _check_schedule(recipe: Recipe) -> None:
    if recipe.optimizer == "lamb" and recipe.moment == "bfloat16":
        raise UserError("recipe: moment=bfloat16 is for adamw and sgd; LAMB keeps its means in float32.")
    if recipe.steps is None and recipe.warmup_epochs is not None and recipe.warmup_epochs >= recipe.epochs:
        raise UserError(
            f"recipe: warmup_epochs={recipe.warmup_epochs:g} leaves nothing of epochs={recipe.epochs}; give a smaller "
            "warmup_epochs, or none for a tenth of the epochs."
        )
    if recipe.warmup_steps is not None and recipe.warmup_epochs is not None:
        raise UserError("recipe: warmup_epochs and warmup_steps say the same thing: give one of them.")
    if recipe.steps is not None and (recipe.warmup_steps or 0) + recipe.cooldown_steps >= recipe.steps:
        raise UserError(
            f"recipe: warmup_steps={recipe.warmup_steps or 0} and cooldown_steps={recipe.cooldown_steps} leave nothing "
            f"of steps={recipe.steps}: give fewer of them."
        )
    if recipe.schedule == "rsqrt" and recipe.min_lr > 0:
        raise UserError("recipe: the rate of rsqrt falls without end and has no min_lr; cooldown_steps brings it to 0.")
    warms_up = recipe.warmup_epochs != 0 and recipe.warmup_steps != 0
    if recipe.schedule == "epoch_cosine" and warms_up and recipe.warmup_lr == 0:
        raise UserError(
            "recipe: epoch_cosine trains two epochs at warmup_lr, which is 0: give one, as DeiT's 1e-6, or "
            "warmup_epochs=0."
        )
    if recipe.min_lr > recipe.lr:
        raise UserError(f"recipe: min_lr={recipe.min_lr:g} is above lr={recipe.lr:g}.")
    peak = recipe.lr * recipe.lr_scale
    if recipe.warmup_lr > peak:
        scaled = "" if recipe.lr_batch is None else f" * batch_size / lr_batch = {peak:g}"
        raise UserError(f"recipe: warmup_lr={recipe.warmup_lr:g} is above lr={recipe.lr:g}{scaled}.")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None or (isinstance(value, int | float) and low <= value <= high and math.isfinite(value)):
        return
    bound = f"at least {low:g} and finite" if high == math.inf else f"from {low:g} to {high:g}"
    raise UserError(f"recipe: {name} must be {bound}, not {value!r}.")
