"""The recipe: everything about training that is neither the model nor the data, in parts. Imports without torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

import tyro

from vitmods.finetune.roles import ALL, TrainedPart
from vitmods.util.errors import UserError, explaining, nearest
from vitmods.util.registry import Registry

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
    "clip_norm": (1e-12, math.inf),
    "norm_blend": (0, 0.9),
    "ema": (0, 0.9999999),
    "dropout": (0, 0.999999),
    "drop_path": (0, 0.999999),
    "patch_drop": (0, 0.999999),
    "head_bias": (-math.inf, math.inf),
    "label_smoothing": (0, 1),
    "flip": (0, 1),
    "repeats": (1, math.inf),
    "erasing": (0, 1),
    "poly_power": (1e-6, math.inf),
    "eval_crop": (0.05, 1),
}
"""of numbers with another range than at least 0"""
_STRONGEST = {"torchvision": 30, "big_vision": 30, "timm": 10}
"""magnitudes up to which an operation of a space is defined"""


def require(is_valid: bool, message: str) -> None:
    """Raise UserError with the message unless the value is valid."""
    if not is_valid:
        raise UserError(f"recipe: {message}")


def check_fields(part: Any) -> None:
    """Raise UserError, naming the option, if a number is out of its range or a word is not one of its choices."""
    ranges = {**_RANGES, **getattr(part, "ranges", {})}
    for option, inner, choices, is_optional in _checked(part.__class__):  # to mypy a type(part) has no hash
        value = getattr(part, option)
        if value is None and is_optional:
            continue
        name = type(part).__name__.lower() if option == "name" else option
        if choices and value not in choices:
            raise UserError(f"recipe: {name} must be one of {', '.join(choices)}, not {value!r}.")
        if inner in (int, float):
            low, high = ranges.get(name, (0, math.inf))
            if not (isinstance(value, int | float) and low <= value <= high and math.isfinite(value)):
                bound = f"at least {low:g} and finite" if high == math.inf else f"from {low:g} to {high:g}"
                raise UserError(f"recipe: {name} must be {bound}, not {value!r}.")
            if inner is int and not isinstance(value, int):
                raise UserError(f"recipe: {name} must be a whole number, not {value!r}.")


@cache
def _checked(kind: Any) -> list[tuple[str, Any, tuple[str, ...], bool]]:
    """The name of each field, its type without None, its choices, and whether it may be None."""
    rows = []
    for name, hint in _hints(kind).items():
        kinds = get_args(hint) or (hint,)
        (inner,) = (choice for choice in (kinds if NoneType in kinds else (hint,)) if choice is not NoneType)
        rows.append((name, inner, get_args(inner) if get_origin(inner) is Literal else (), NoneType in kinds))
    return rows


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Augment:
    """How images are cropped, augmented and normalized."""

    crop: Literal["none", "pad", "random_resized", "inception"] = "pad"
    """resize only; pad by an eighth of the side and crop at random; or random area and aspect, drawn as torchvision
    does or as TensorFlow does, smaller on average"""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """area of a random_resized or inception crop, as a fraction of the image"""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """aspect (width over height) of a random_resized or inception crop"""
    flip: float = 0.5
    """probability of a left-right flip"""
    resample: Literal["bicubic", "bilinear", "big_vision"] = "bicubic"
    """how images are resized, with antialiasing; or as in big_vision, bilinear without, and by areas to evaluate"""
    repeats: int = 1
    """views of an image in an epoch, which then has so many times fewer images (arXiv:1901.09335)"""
    sampler: Literal["each", "balanced"] = "each"
    """an epoch visits each image once; or, as many times, images of every class equally often"""
    randaugment: tuple[int, float] | None = None
    """RandAugment (arXiv:1909.13719): operations per image, magnitude"""
    randaugment_space: Literal["torchvision", "big_vision", "timm"] = "torchvision"
    """whose operations: torchvision's (magnitude 0 to 30), big_vision's (10 is its scale, more is stronger), or timm's
    increasing ones (0 to 10), each of which is done with probability 0.5"""
    randaugment_noise: float = 0.0
    """standard deviation of the magnitude; only for timm's operations"""
    erasing: float = 0.0
    """probability of erasing a random rectangle (arXiv:1708.04896)"""
    mixup: float = 0.0
    """alpha of mixup's Beta distribution (arXiv:1710.09412); 0: off"""
    cutmix: float = 0.0
    """alpha of CutMix's Beta distribution (arXiv:1905.04899); 0: off. With mixup too, each batch draws one of them"""
    eval_crop: float = 0.875
    """fraction of the resized image's side that the center crop of the evaluation keeps"""
    mean: tuple[float, ...] = (0.5,)
    """subtracted from pixels in [0, 1]; one value, or one a channel"""
    std: tuple[float, ...] = (0.5,)
    """what pixels are then divided by; one value, or one a channel"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("crop_scale", "crop_ratio", "randaugment"):
            pair = getattr(self, name)
            require(pair is None or len(pair) == 2, f"{name} is two numbers, not {pair}.")
        require(
            self.sampler == "each" or self.repeats == 1, "sampler=balanced repeats images itself: leave out repeats."
        )
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            require(0 < low <= high, f"{name} must be two increasing numbers above 0, not {(low, high)}.")
        require(self.crop_scale[1] <= 1, f"crop_scale is a fraction of the image, at most 1, not {self.crop_scale}.")
        for name in ("mean", "std"):
            values = getattr(self, name)
            require(len(values) in (1, 3), f"{name} must be one number, or three for RGB, not {values}.")
        require(min(self.std) > 0, f"std must be above 0, not {self.std}.")
        if self.randaugment is not None:
            (operations, magnitude), strongest = self.randaugment, _STRONGEST[self.randaugment_space]
            require(
                operations >= 1 and 0 <= magnitude <= strongest,
                f"randaugment is (operations >= 1, magnitude 0 to {strongest}) with the operations of "
                f"{self.randaugment_space}, not {self.randaugment}.",
            )
            require(
                self.randaugment_noise <= 0 or self.randaugment_space == "timm",
                "randaugment_noise is only for the operations of timm: set it to 0, or randaugment_space to timm.",
            )


@dataclass(frozen=True)
class Loss:
    """The loss that training minimizes."""

    name: Annotated[Literal["softmax", "sigmoid", "bce"], tyro.conf.arg(name="loss")] = "softmax"
    """cross-entropy over classes; binary cross-entropy summed over classes; or its mean, where every class that a mixed
    image holds counts as whole (arXiv:2110.00476)"""
    label_smoothing: float = 0.0
    """fraction of each target that is spread evenly over all classes"""
    class_weights: Literal["equal", "balanced"] = "equal"
    """images count alike; or by n / (K n_k), for a class of n_k of the n training images of K classes"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Optimizer:
    """How gradients change the weights."""

    name: Annotated[Literal["adamw", "sgd", "lamb"], tyro.conf.arg(name="optimizer")] = "adamw"
    """Adam with decoupled weight decay (arXiv:1711.05101), SGD with momentum, or LAMB (arXiv:1904.00962)"""
    moment: Literal["float32", "bfloat16"] = "float32"
    """how Adam's mean of gradients, or the momentum of SGD, is stored"""
    lr: float = 1e-3
    """highest learning rate"""
    lr_batch: int | None = None
    """the batch size that `lr` and `min_lr` are for: they are multiplied by batch_size / lr_batch; None: as given"""
    layer_decay: float | None = None
    """each block learns at this fraction of the rate of the one above it, stem and positions below all; None: alike"""
    weight_decay: float = 0.05
    """decay per step is lr * weight_decay (PyTorch's convention); not on biases, norms, position or tokens"""
    weight_decay_end: float | None = None
    """weight decay at the end, reached along half a cosine; None: constant"""
    decay_all: bool = False
    """weights decay on those too"""
    beta1: float = 0.9
    """decay of the mean of gradients of Adam and LAMB"""
    beta2: float = 0.999
    """decay of their mean of squared gradients"""
    momentum: float = 0.9
    """of SGD"""
    adam_eps: float = 1e-8
    """added to the root in the denominator of Adam and LAMB"""
    clip_norm: float | None = 1.0
    """largest global gradient norm; None: no clipping"""
    clip_each: bool = False
    """clip the gradient of each parameter by its own norm, not all by their global norm"""

    def __post_init__(self) -> None:
        check_fields(self)
        is_stored = self.name != "lamb" or self.moment != "bfloat16"
        require(is_stored, "moment=bfloat16 is for adamw and sgd; LAMB keeps its means in float32.")
        require(self.clip_norm is not None or not self.clip_each, "clip_each needs a clip_norm.")


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes over the training."""

    name: Annotated[
        Literal["cosine", "linear", "rsqrt", "epoch_cosine", "dino_cosine", "poly", "step"],
        tyro.conf.arg(name="schedule"),
    ] = "cosine"
    """how the rate falls: by half a cosine, by a line, as 1 / sqrt(step), by the cosine once an epoch as in DeiT, by a
    cosine whose warm-up ends a step earlier as in DINO, as a power of the steps that are left, or to a tenth at some of
    them"""
    warmup_epochs: float | None = None
    """epochs of linear warm-up; None: a tenth of `epochs`, at most 5, or a tenth of `steps`"""
    warmup_steps: int | None = None
    """the same in steps; None: by `warmup_epochs`"""
    warmup_lr: float = 0.0
    """learning rate at the start of the warm-up, whatever the batch size"""
    min_lr: float = 0.0
    """learning rate that the schedule ends at"""
    rsqrt_timescale: int = 10_000
    """steps after the warm-up until the rate of `rsqrt` has fallen to lr / sqrt(2)"""
    poly_power: float = 0.9
    """that power of `poly`"""
    step_at: tuple[float, ...] = (2 / 3, 11 / 12)
    """fractions of the training after which the rate of `step` falls to a tenth; those of COCO's 1x: 8 and 11 of 12"""
    cooldown_steps: int = 0
    """last steps, over which a line from 1 to 0 multiplies the rate"""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the model that training changes; None: as the model has it."""

    dropout: float | None = None
    """after positions, attention and both layers of the MLP; None: as the model has it"""
    drop_path: float | None = None
    """rate of stochastic depth (arXiv:1603.09382) in the last block; None: as the model has it"""
    drop_path_shape: Literal["linear", "constant"] | None = None
    """whether that rate grows with depth from 0, or is every block's; None: as the model has it"""
    patch_drop: float | None = None
    """fraction of each image's patches that a training step leaves out (arXiv:2208.07220); None: as the model has it"""
    init: Literal["timm", "big_vision", "beit"] | None = None
    """whose initial weights; None: as the model has it"""
    head_bias: float | None = None
    """initial bias of the head; None: as the model has it"""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_config(self) -> dict[str, Any]:
        """The settings as fields of a ViTConfig: `vm.vit("S/16", **recipe.model.to_config())`."""
        settings = {"pos_drop": self.dropout, "proj_drop": self.dropout, "drop_path": self.drop_path}
        settings |= {name: getattr(self, name) for name in ("drop_path_shape", "patch_drop", "init", "head_bias")}
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class TaskPart:
    """Fields of a recipe that only one task reads. A task registers its own::

        @TASK_PARTS.register("depth")
        @dataclass(frozen=True)
        class DepthPart(TaskPart):
            scale: float = 1.0

    Fields need defaults and names that no other part uses. ``ranges`` bounds numbers that may be other than at least 0.
    ``files`` lists the fields that name files or folders.
    """

    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    files: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)


TASK_PARTS: Registry[type[TaskPart]] = Registry("part of a recipe", "vitmods.tasks.*.recipes")
P = TypeVar("P", bound=TaskPart)
Precision = Literal["32-true", "bf16-mixed", "fp16-mixed"]


class Rate(NamedTuple):
    """The learning rate and the layer decay with which a part of trained weights is trained: `all`, or a role."""

    part: str
    lr: float
    layer_decay: float | None = None


@dataclass(frozen=True)
class Recipe:
    """How one trial is trained: its length and batches, five parts, and parts of tasks.

    Fields of the parts are set by their names: `recipe.with_(lr=1e-4, crop="none")`, or `--lr 1e-4 --crop none` in the
    shell. `optimizer="sgd"` sets the name of that part.

    Raises:
        UserError: a value is out of its range; the message names the field and the range.
    """

    epochs: int = 30
    """passes over the training images"""
    steps: int | None = None
    """optimizer steps; None: those of `epochs`"""
    batch_size: int = 64
    """images per optimizer step"""
    accumulate: int = 1
    """parts each batch is computed in, to save memory; the gradient is the one of the whole batch"""
    train: str = "all"
    """what is trained, the rest is frozen: attention, ffn, norms, head or other roles, biases, last(4), lora(rank=8) or
    dora(rank=8), joined by + (docs/finetune.md)"""
    head_start: Literal["drawn", "probe"] = "drawn"
    """drawn at random; or, for trained weights and images with classes, a linear probe of what the head reads (Kumar et
    al., arXiv:2202.10054)"""
    norm_blend: float = 0.0
    """fraction of the training over which norms that a change adds to the model are blended in: x + a (norm(x) - x)
    with a from 0 to 1; 0: they are whole from the first step"""
    ema: float | None = None
    """decay of the moving average of weights, which is then evaluated; None: no average"""
    precision: Precision = "32-true"
    """float32 throughout, or float32 weights with arithmetic in bfloat16 or in float16, whose losses are scaled"""
    augment: Augment = field(default_factory=Augment)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    model: ModelSettings = field(default_factory=ModelSettings)
    task_parts: Annotated[tuple[TaskPart, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """parts of tasks; those that have only defaults are left out"""
    rates: Annotated[tuple[Rate, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """the rates that `with_` sets with `train`: those of the first row that is trained, or of the row `all` where
    everything is, or a role without a row. A field that is set by itself holds for every row"""
    paper: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = field(default="", compare=False)
    """the recipe, as text, whose paper trains ViTs of its own (`vitmods.recipes.registry.network`): base is then one of
    them; empty: base is what its name says"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(Rate(*row) for row in self.rates))
        parts = sorted((part for part in self.task_parts if part != type(part)()), key=lambda part: type(part).__name__)
        object.__setattr__(self, "task_parts", tuple(parts))
        check_fields(self)
        try:
            object.__setattr__(self, "train", TrainedPart.of(self.train).text)
        except UserError as error:
            raise UserError(f"recipe: train: {error}") from None
        self._check_lengths()
        self._check_rates()
        for rate in self.rates:
            TrainedPart.of(rate.part)
            Optimizer(lr=rate.lr, layer_decay=rate.layer_decay)  # checks the ranges
        require(not self.rates or ALL in {rate.part for rate in self.rates}, f"rates need a row for {ALL}.")

    def _check_lengths(self) -> None:
        schedule = self.schedule
        require(
            self.steps is not None or schedule.warmup_epochs is None or schedule.warmup_epochs < self.epochs,
            f"warmup_epochs={schedule.warmup_epochs or 0:g} leaves nothing of epochs={self.epochs}; give a smaller "
            "warmup_epochs, or none for a tenth of the epochs.",
        )
        require(
            schedule.warmup_steps is None or schedule.warmup_epochs is None,
            "warmup_epochs and warmup_steps set the same thing: give one of them.",
        )
        require(
            self.steps is None or (schedule.warmup_steps or 0) + schedule.cooldown_steps < self.steps,
            f"warmup_steps={schedule.warmup_steps or 0} and cooldown_steps={schedule.cooldown_steps} leave nothing of "
            f"steps={self.steps}: give fewer of them.",
        )

    def _check_rates(self) -> None:
        schedule, lr, peak = self.schedule, self.optimizer.lr, self.optimizer.lr * self.lr_scale
        at, warms_up = schedule.step_at, schedule.warmup_epochs != 0 and schedule.warmup_steps != 0
        require(
            all(0 < fraction < 1 for fraction in at) and list(at) == sorted(at),
            f"step_at must be increasing fractions between 0 and 1, not {at}.",
        )
        require(
            schedule.name != "step" or schedule.min_lr <= 0,
            "the rate of step falls to a tenth at each of step_at, without min_lr: leave it at 0.",
        )
        require(
            schedule.name != "rsqrt" or schedule.min_lr <= 0,
            "the rate of rsqrt falls without end, without min_lr; cooldown_steps brings it to 0.",
        )
        require(
            schedule.name != "epoch_cosine" or not warms_up or schedule.warmup_lr != 0,
            "epoch_cosine trains two epochs at warmup_lr, which is 0: give one, as DeiT's 1e-6, or warmup_epochs=0.",
        )
        require(schedule.min_lr <= lr, f"min_lr={schedule.min_lr:g} is above lr={lr:g}.")
        lr_batch = self.optimizer.lr_batch
        scaled = "" if lr_batch is None else f" * batch_size / lr_batch = {peak:g}"
        require(schedule.warmup_lr <= peak, f"warmup_lr={schedule.warmup_lr:g} is above lr={lr:g}{scaled}.")

    @property
    def lr_scale(self) -> float:
        """The factor of `lr` and `min_lr` for the batch size."""
        lr_batch = self.optimizer.lr_batch
        return 1.0 if lr_batch is None else self.batch_size / lr_batch

    @property
    def part_size(self) -> int:
        """Images that are on the device at once: the largest part of a batch."""
        return -(-self.batch_size // self.accumulate)

    def part(self, kind: type[P]) -> P:
        """The fields of a task's part."""
        return next((part for part in self.task_parts if isinstance(part, kind)), None) or kind()

    def with_(self, **overrides: Any) -> Self:
        """A copy with some fields changed: of the recipe, of its parts by their own names, or whole parts.

        Raises:
            UserError: a field is unknown (the nearest is named), or its value is out of range.
        """
        if self.rates and "rates" not in overrides:
            overrides = self._at_rates(overrides)
        fields, parts, changes = fields_by_name(), dict[str, dict[str, Any]](), dict[str, Any]()
        for name, value in overrides.items():
            if dataclasses.is_dataclass(value) or name not in fields:
                changes[name] = value
                continue
            part, leaf, _ = fields[name]
            (parts.setdefault(part, {}) if part else changes)[leaf] = tupled(value)
        unknown = sorted(set(changes) - {item.name for item in dataclasses.fields(self)} - {*TASK_PARTS})
        if unknown:
            raise UserError(f"A recipe does not have a field {unknown[0]!r}. {nearest(unknown[0], fields)}")
        for part, values in parts.items():
            old = changes.get(part) or (self.part(TASK_PARTS[part]) if part in TASK_PARTS else getattr(self, part))
            changes[part] = dataclasses.replace(old, **values)
        if of_tasks := [changes.pop(name) for name in list(changes) if name in TASK_PARTS]:
            kept = [part for part in self.task_parts if type(part) not in map(type, of_tasks)]
            changes["task_parts"] = (*kept, *of_tasks)
        return dataclasses.replace(self, **changes)

    def _at_rates(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The overrides with the rate of what they train, as far as they do not set it."""
        given = {name: overrides[name] for name in Rate._fields if name in overrides}
        rates = tuple(rate._replace(**given) for rate in self.rates)
        if "train" not in overrides:
            return {**overrides, "rates": rates}
        part = TrainedPart.of(overrides["train"])
        all_have_rows = part.names and part.names <= {rate.part for rate in rates}
        names = part.names if all_have_rows else {ALL}
        rate = next(rate for rate in rates if rate.part in names)
        return {"lr": rate.lr, "layer_decay": rate.layer_decay, **overrides, "rates": rates}

    def check_read(self, names: Collection[str]) -> None:
        """Raise UserError for a field among `names` that this optimizer or schedule does not read."""
        for name, part, kinds in READ_BY:
            if name in names and (kind := getattr(self, part).name) not in kinds:
                raise UserError(f"{name} has no effect with the {part} {kind}: leave it out.")

    def settings(self) -> dict[str, Any]:
        """Every field by its own name: the inverse of `Recipe().with_(**settings)`."""
        parts = {"": self} | {name: getattr(self, name) for name in PARTS}
        parts |= {name: self.part(kind) for name, kind in TASK_PARTS.items()}
        values = {name: getattr(parts[part], leaf) for name, (part, leaf, _) in fields_by_name().items()}
        return {**values, "rates": self.rates} if self.rates else values

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with a mapping for each part; `Recipe.from_dict` gives the recipe back."""
        values = dataclasses.asdict(self)
        del values["task_parts"], values["paper"]  # base is written with what the paper's models have
        for (*part, name), usual in _ADDED.items():  # not in folders of trials that do without
            within = values[part[0]] if part else values
            if within[name] == usual:
                del within[name]
        names = {kind: name for name, kind in TASK_PARTS.items()}
        return values | {names[type(part)]: dataclasses.asdict(part) for part in self.task_parts}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The recipe that `to_dict` described; fields that are missing keep their defaults, unknown ones raise."""
        flat: dict[str, Any] = {}
        kinds = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
        with explaining(lambda error: f"Invalid settings of a recipe: {error}.", *kinds):
            for name, value in values.items():
                is_part = isinstance(value, Mapping)
                if is_part and name not in PARTS and name not in TASK_PARTS:
                    raise UserError(
                        f"These settings have '{name}', a part of a task that is not loaded: add --plugin MODULE "
                        "(in Python, import the module first)."
                    )
                part = value if is_part else {"name": value}
                flat |= {name if leaf == "name" else leaf: v for leaf, v in part.items()}
            return cls().with_(**flat)


_ADDED: dict[tuple[str, ...], Any] = {
    ("rates",): (),
    ("head_start",): "drawn",
    ("norm_blend",): 0.0,
    ("augment", "sampler"): "each",
    ("loss", "class_weights"): "equal",
}
"""fields that trials of before lack -> what they have then"""

READ_BY = (
    ("momentum", "optimizer", ("sgd",)),
    ("beta1", "optimizer", ("adamw", "lamb")),
    ("beta2", "optimizer", ("adamw", "lamb")),
    ("adam_eps", "optimizer", ("adamw", "lamb")),
    ("rsqrt_timescale", "schedule", ("rsqrt",)),
    ("poly_power", "schedule", ("poly",)),
    ("step_at", "schedule", ("step",)),
)
"""fields that some optimizers or schedules alone read"""

PARTS = {
    "augment": Augment,
    "loss": Loss,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "model": ModelSettings,
}


_NOT_OPTIONS = ("task_parts", "rates", "paper")
"""fields without a name in the shell"""


def fields_by_name() -> dict[str, tuple[str, str, Any]]:
    """Name of a field -> (the part it is in, or "", its name there, its type). A part's `name` has the part's.

    Raises:
        UserError: a task's part has a field whose name is in use.
    """
    return _fields_by_name(tuple(TASK_PARTS.items()))


@cache
def _fields_by_name(of_tasks: tuple[tuple[str, type], ...]) -> dict[str, tuple[str, str, Any]]:
    fields = {name: ("", name, kind) for name, kind in _hints(Recipe).items() if name not in (*PARTS, *_NOT_OPTIONS)}
    for part, kind_of_part in (*PARTS.items(), *of_tasks):
        for leaf, kind in _hints(kind_of_part).items():
            name = part if leaf == "name" else leaf
            if name in fields or (name in PARTS and leaf != "name"):
                raise UserError(f"{kind_of_part.__name__}: a recipe has a field {name!r} already; choose another name.")
            fields[name] = (part, leaf, kind)
    return fields


def tupled(value: Any) -> Any:
    """Turn lists, as JSON has them, back into tuples."""
    return tuple(value) if isinstance(value, list) else value


def weight_decay_from_big_vision(weight_decay: float, lr: float) -> float:
    """big_vision's decay, which is not multiplied by the learning rate, in the convention of `weight_decay` here.

    Where the schedule runs from 1 down to 0 and lr is its peak, big_vision takes `schedule * weight_decay * w` off each
    weight, PyTorch `schedule * lr * weight_decay * w`: its 1e-4 at lr 1e-3 is 0.1 here. Of a recipe with `lr_batch`,
    lr is the one after scaling.

    Raises:
        UserError: lr is not above 0.
    """
    if lr <= 0:
        raise UserError(f"weight_decay_from_big_vision: lr must be above 0, not {lr}.")
    return weight_decay / lr
