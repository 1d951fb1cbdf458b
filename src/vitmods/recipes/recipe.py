"""The recipe: everything about training that is neither the model nor the data. Imports without torch."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self

from vitmods.errors import UserError, nearest
from vitmods.finetune.roles import chosen_roles


@dataclass(frozen=True)
class Recipe:
    """How one trial is trained. Every field is read by the code; what is not listed here cannot be set.

    Raises:
        UserError: a value is out of its range; the message names the field and the range.
    """

    epochs: int = 30
    """passes over the training pictures"""
    batch_size: int = 64
    """pictures per optimiser step"""
    accumulate: int = 1
    """parts each batch is computed in, to save memory; the gradient is the one of the whole batch"""

    train: str = "all"
    """what is trained, the rest is frozen: attention, ffn, norms, head or other roles joined by + (docs/finetune.md)"""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv:1711.05101), or SGD with momentum"""
    lr: float = 1e-3
    """highest learning rate"""
    weight_decay: float = 0.05
    """decay per step is lr * weight_decay (PyTorch's convention); not on biases, norms, position or tokens"""
    beta1: float = 0.9
    """decay of Adam's mean of gradients"""
    beta2: float = 0.999
    """decay of Adam's mean of squared gradients"""
    momentum: float = 0.9
    """of SGD"""
    adam_eps: float = 1e-8
    """added to the root in Adam's denominator"""
    warmup_epochs: float | None = None
    """epochs of linear warm-up from 0; None: a tenth of `epochs`, at most 5"""
    min_lr: float = 0.0
    """learning rate that the cosine ends at"""
    clip_norm: float | None = 1.0
    """largest global gradient norm; None: no clipping"""
    ema: float | None = None
    """decay of the moving average of weights, which is then what is evaluated; None: no average"""

    loss: Literal["softmax", "sigmoid"] = "softmax"
    """cross-entropy over classes, or binary cross-entropy summed over classes"""
    label_smoothing: float = 0.0
    """share of each target that is spread evenly over all classes"""

    crop: Literal["none", "pad", "random_resized"] = "pad"
    """resize only; pad by an eighth of the side and crop at random; or random area and aspect"""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """area of a random_resized crop, as a share of the picture"""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """aspect (width over height) of a random_resized crop"""
    flip: float = 0.5
    """probability of a left-right flip"""
    randaugment: tuple[int, int] | None = None
    """RandAugment (arXiv:1909.13719): operations per picture, magnitude from 0 to 30"""
    erasing: float = 0.0
    """probability of erasing a random rectangle (arXiv:1708.04896)"""
    mixup: float = 0.0
    """alpha of mixup's Beta distribution (arXiv:1710.09412); 0: off"""
    cutmix: float = 0.0
    """alpha of CutMix's Beta distribution (arXiv:1905.04899); 0: off. With mixup too, each batch draws one of them"""
    eval_crop: float = 0.875
    """share of the resized picture's side that the centre crop of the evaluation keeps"""
    mean: tuple[float, ...] = (0.5,)
    """subtracted from pixels in [0, 1]; one value, or one a channel"""
    std: tuple[float, ...] = (0.5,)
    """what pixels are then divided by; one value, or one a channel"""

    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """float32 throughout, or float32 weights with bfloat16 arithmetic"""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise UserError if a value is out of its range."""
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        for name in ("epochs", "batch_size", "accumulate"):
            if not isinstance(getattr(self, name), int):
                raise UserError(f"recipe: {name} must be a whole number, not {getattr(self, name)!r}.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"recipe: {name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}.")
        try:
            chosen_roles(self.train)
        except UserError as error:
            raise UserError(f"recipe: train: {error}") from None
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UserError(f"recipe: {name} must be two increasing numbers above 0, not {getattr(self, name)}.")
        if self.crop_scale[1] > 1:
            raise UserError(f"recipe: crop_scale is a share of the picture, at most 1, not {self.crop_scale}.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, 3):
                raise UserError(f"recipe: {name} must be one number, or three for RGB, not {getattr(self, name)}.")
        if min(self.std) <= 0:
            raise UserError(f"recipe: std must be above 0, not {self.std}.")
        if self.randaugment is not None and not (self.randaugment[0] >= 1 and 0 <= self.randaugment[1] <= 30):
            raise UserError(f"recipe: randaugment is (operations >= 1, magnitude 0 to 30), not {self.randaugment}.")
        if self.warmup_epochs is not None and self.warmup_epochs >= self.epochs:
            raise UserError(
                f"recipe: warmup_epochs={self.warmup_epochs:g} leaves nothing of epochs={self.epochs}; give a smaller "
                "warmup_epochs, or none for a tenth of the epochs."
            )
        if self.min_lr > self.lr:
            raise UserError(f"recipe: min_lr={self.min_lr:g} is above lr={self.lr:g}.")

    @property
    def resolved_warmup_epochs(self) -> float:
        """Epochs of warm-up, with the default filled in."""
        return min(0.1 * self.epochs, 5.0) if self.warmup_epochs is None else self.warmup_epochs

    @property
    def part_size(self) -> int:
        """Pictures that are on the device at once: the largest part of a batch."""
        return -(-self.batch_size // self.accumulate)

    def with_(self, **overrides: Any) -> Self:
        """A copy with some fields changed.

        Raises:
            UserError: there is no such field (the nearest is named), or its value is out of range.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in overrides:
            if name not in names:
                raise UserError(f"A recipe has no field {name!r}. {nearest(name, names)}")
        return dataclasses.replace(self, **{name: _tupled(value) for name, value in overrides.items()})

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `Recipe.from_dict` gives the recipe back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The recipe that `to_dict` described; fields that are missing keep their defaults, unknown ones raise."""
        return cls().with_(**values)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("epochs", 1, float("inf")),
    ("batch_size", 1, float("inf")),
    ("accumulate", 1, float("inf")),
    ("lr", 0, float("inf")),
    ("weight_decay", 0, float("inf")),
    ("beta1", 0, 0.999999),
    ("beta2", 0, 0.999999),
    ("momentum", 0, 0.999999),
    ("adam_eps", 0, 1),
    ("warmup_epochs", 0, float("inf")),
    ("min_lr", 0, float("inf")),
    ("clip_norm", 1e-12, float("inf")),
    ("ema", 0, 0.9999999),
    ("label_smoothing", 0, 1),
    ("flip", 0, 1),
    ("erasing", 0, 1),
    ("mixup", 0, float("inf")),
    ("cutmix", 0, float("inf")),
    ("eval_crop", 0.05, 1),
)
_CHOICES = {
    "optimizer": ("adamw", "sgd"),
    "loss": ("softmax", "sigmoid"),
    "crop": ("none", "pad", "random_resized"),
    "precision": ("32-true", "bf16-mixed"),
}


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None or low <= value <= high:
        return
    bound = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
    raise UserError(f"recipe: {name} must be {bound}, not {value!r}.")


def _tupled(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def weight_decay_from_big_vision(weight_decay: float, lr: float) -> float:
    """big_vision's decay, which is not multiplied by the learning rate, in the convention of `Recipe.weight_decay`.

    big_vision takes `schedule * weight_decay * w` off each weight, PyTorch `schedule * lr * weight_decay * w`: its
    1e-4 at lr 1e-3 is 0.1 here.
    """
    if lr <= 0:
        raise UserError(f"weight_decay_from_big_vision: lr must be above 0, not {lr}.")
    return weight_decay / lr
