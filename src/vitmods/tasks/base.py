"""The interface of tasks: everything that loop, study and report need to know about training and measuring."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.data.dataset import Joint, JointView, Split
from vitmods.data.loading import load
from vitmods.recipes import TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.recipe import fields_by_name
from vitmods.tasks.features import head_inputs
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry

DEFAULT = "classification"
WITHOUT_LABELS = ("none", "any", "text")
"""targets of tasks for pre-training"""
Splits = Sequence[Split]
TASKS: Registry[type["Task"]] = Registry(
    "task", "vitmods.tasks", "vitmods.tasks.*.task", check="vitmods.evals.protocols:metrics"
)
"""name -> Task. A file adds its own with `@TASKS.register("name")`, here or in a plugin."""


@dataclass(frozen=True)
class Example:
    """An evaluated image to look at: its position in the split, and drawings uint8 (H, W, 3) of one size by name, of
    them "image", "annotation" and "prediction"."""

    index: int
    panels: Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class Measured:
    """The result of an evaluation.

    metrics: the task's, by their names, and `loss`. per_image: (n,) arrays in the order of the images, among them one
    for each metric that is a mean over images. Its `predicted` is the number of the class of a whole image (-1:
    several): a trial with one class for all images has learned nothing. examples: drawings of a few images. detail:
    JSON-able lists by name, with one entry per class. failure: why the model learned nothing, if it did: the trial ends
    as diverged.
    """

    metrics: dict[str, float]
    per_image: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    detail: Mapping[str, list[Any]] = field(default_factory=dict)
    failure: str | None = None


class Predicted(NamedTuple):
    """An image and its entry of `predictions`. name: unique, for a file; size: height and width in the image's file."""

    name: str
    path: Path
    size: tuple[int, int]
    prediction: Mapping[str, Any]


class Task(ABC):
    """Loss, evaluation and predictions; one object per trial, made from the trial's recipe.

    Only `loss`, `evaluate` and `synthetic` must be written. A task with a state (a teacher, a running center) makes it
    in `begin` and saves it by `state_dict`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """a description in a few words"""
    target: ClassVar[str] = "class"
    """the fact that it asks of each image: "class", "labels" (any number), "none" (only images), "any" (a class
    if there is one), or another name of `vitmods.data.multilabel.TARGETS` or of a user's source"""
    inputs: ClassVar[str] = "images"
    """the inputs of its model; a task with another word here overrides `load_data` and `read_files`"""
    metrics: ClassVar[tuple[Metric, ...]]
    """the results of `evaluate`; trials are compared by the first unless `compared_by` or the user names another"""
    compared_by: ClassVar[str | None] = None
    """the metric of a protocol, such as "knn", that trials are compared by where the images allow it"""
    protocol_epochs: ClassVar[int] = 20
    """epochs between two measurements of `compared_by` in training; it is also measured at the end"""
    usual_recipe: ClassVar[str | None] = None
    """the default recipe; None: chosen to fit the images"""
    small_recipe: ClassVar[str | None] = None
    """the default recipe for few or small images; None: `usual_recipe`"""
    recipe_part: ClassVar[type[TaskPart] | None] = None
    """the part of the recipe that only this task reads; see `vitmods.recipes.TASK_PARTS`"""
    libraries: ClassVar[tuple[str, ...]] = ()
    """other packages whose version changes the numbers"""
    unread: ClassVar[tuple[str, ...]] = ()
    """fields of other parts that the task ignores: `make_task` refuses them"""
    same_shapes: ClassVar[bool] = True
    """whether convolutions have the same shapes in all steps"""
    divides: ClassVar[bool] = True
    """whether `evaluate` only calls `model(inputs)`, so that several processes can share the images; otherwise each
    evaluates all"""
    hub_tag: ClassVar[str | None] = None
    """the task's name on the Hugging Face Hub"""
    uses_head: ClassVar[bool] = True
    """whether the backbone keeps its head, with an output for each class"""
    probe_blocks: int = 1
    """number of last blocks whose class tokens the protocol probe reads; 1: `features`"""
    reads_any_classes: ClassVar[bool] = False
    """whether `evaluate` reads images of other classes than those of training"""
    whole_batch: ClassVar[bool] = False
    """whether the loss compares the images of a batch with each other: the batch is then not accumulated from parts,
    and the loss gathers those of other processes by `gather`"""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """The task with the settings of the recipe. Raises UserError for settings that it does not support."""
        return cls()

    @classmethod
    def fitted(cls, recipe: Recipe) -> Recipe:
        """Adapt a recipe of another task: ignored fields get their defaults."""
        usual = Recipe().settings()
        return recipe.with_(**{name: usual[name] for name in cls.ignored_fields()})

    @classmethod
    def ignored_fields(cls) -> list[str]:
        """List the fields of a recipe that the task does not read: `unread`, those of other tasks' parts, what a
        teacher or a loss over the whole batch replaces, and what needs images of one class each."""
        others = {name for name, kind in TASK_PARTS.items() if kind is not cls.recipe_part}
        replaced = {"ema": cls.has_teacher(), "accumulate": cls.whole_batch}
        has_classes = cls.uses_head and cls.target == "class" and cls.inputs == "images"
        replaced |= dict.fromkeys(("head_start", "sampler", "class_weights"), not has_classes)
        fields = [*cls.unread, *(name for name, (part, *_) in fields_by_name().items() if part in others)]
        return [*fields, *(name for name, is_replaced in replaced.items() if is_replaced and name not in fields)]

    @classmethod
    def has_teacher(cls) -> bool:
        """Whether the task keeps another model, which is evaluated and saved instead of the trained one."""
        return cls.evaluated is not Task.evaluated

    @property
    def needs_trained_backbone(self) -> bool:
        """Whether training a new backbone makes no sense, as where it is frozen: a study then needs trained weights."""
        return False

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """Return the score of the best constant prediction, by each metric where it is known: for top-1 the share of
        the most frequent class. A trial must exceed it to have learned (docs/verdicts.md).

        By default it is known for k-NN and the linear probe on images with classes.

        splits: the images that trials are compared on; classes: their number.
        """
        if cls.target != "any" or classes < 2 or any(split.label_sets is not None for split in splits):
            return {}
        counts = np.bincount(np.concatenate([split.labels for split in splits]))
        return dict.fromkeys(("knn", "probe"), float(counts.max() / counts.sum()))

    def warnings(self, model: nn.Module) -> Iterable[str]:
        """Facts about an arm's model that a reader of its results in this task must know, such as a leak of what is to
        be predicted: "its ..."; dry runs and reports have them."""
        return ()

    @property
    def joint(self) -> Joint | None:
        """The function that augments images and targets together; None: only images are augmented and mixed. A class
        may set it to a staticmethod."""
        return None

    @property
    def joint_view(self) -> JointView | None:
        """The function that prepares both for evaluation; None: only images are resized and cropped. To predict,
        annotations are None."""
        return None

    def load_data(self, spec: str, **options: Any) -> Any:
        """Read the data set of `spec`; options: those of `vitmods.data.load` but target and joint views."""
        return load(spec, target=self.target, joint=self.joint, joint_view=self.joint_view, **options)

    def read_files(self, paths: Sequence[Path], data: Mapping[str, Any], longest: int) -> dict[str, Tensor]:
        """Named inputs of files to predict, for a task with other inputs than images.

        data: the data's entry in the trial's config.json; longest: the second side of img_size.
        """
        raise UserError(f"The task {self.name} cannot read files to predict: give it `read_files` (docs/tasks.md).")

    def stack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Stack inputs from `read_files` to one batch."""
        return torch.stack(list(inputs))

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The model to train: the backbone itself, or a TaskModel with further modules, initialized from torch's
        seeded random numbers."""
        return backbone

    def check_size(self, img_size: tuple[int, int]) -> None:  # noqa: B027 - most tasks take any
        """Raise UserError if the task's settings do not suit images of this size (rows, columns)."""

    def check_metric(self, name: str, split: Any) -> None:  # noqa: B027 - most measure all
        """Raise UserError if the images of a split do not allow one of the task's metrics."""

    def fit(self, model: nn.Module, dataset: Any) -> None:  # noqa: B027
        """Fit parts of the model to the training split, such as a tokenizer: called before the first step, also of a
        resumed trial, without random numbers. What `evaluate` needs later belongs into the model's state dict."""

    def training_data(self, model: nn.Module, dataset: Any) -> Any:
        """The data set whose batches are trained on, after `fit`: here targets can be made ready by what `model` has
        learned, such as a tokenizer, in the threads that prepare images."""
        return dataset

    def begin(self, model: nn.Module) -> None:  # noqa: B027 - most tasks keep nothing
        """Prepare the training: called before the first step, also of a resumed trial, with the model on its device."""

    def evaluated(self, model: nn.Module) -> nn.Module | None:
        """The model that is evaluated and saved instead of `model`, such as a teacher made in `begin`; None: `model`
        or, with the recipe's `ema`, its average. `state_dict` saves it between steps."""
        return None

    def before_step(self, model: nn.Module, step: int, steps: int) -> None:  # noqa: B027
        """Called with clipped gradients before the optimizer's step number `step` (from 1) of `steps`."""

    def after_step(self, model: nn.Module, step: int, steps: int) -> None:  # noqa: B027
        """Update the task's state: called after the optimizer's step number `step` (from 1) of `steps`."""

    def state_dict(self) -> dict[str, Any]:
        """State that later steps depend on: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, after `begin`."""
        assert not state, f"{self.name} keeps nothing"

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the images of `batch`, and statistics for the log: 0-d means over the images."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """Metrics over all images of `batches`. Raises UserError without images."""

    @abstractmethod
    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """A batch of noise at the cost of a real one: `count` images of `shape` (C, H, W), and their targets."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate a tensor (B, ...) of `loss` over the processes that train together. Gradients return to each: if
        all compute the same loss of the whole batch, they train as one process would."""
        if not (dist.is_available() and dist.is_initialized()):
            return tensor
        from torch.distributed.nn.functional import all_gather

        return torch.cat(all_gather(tensor.contiguous()))

    def mean(self, tensor: Tensor) -> Tensor:
        """Average a tensor of `loss` over the processes that train together, with gradients."""
        return self.gather(tensor[None]).mean(dim=0)

    def features(self, model: nn.Module, batch: Batch) -> Tensor:
        """Features (B, C) of a batch's images, which k-NN, probes and few-shot transfer read; by default the inputs of
        the backbone's head. UserError if the head is not known."""
        backbone = model.backbone if isinstance(model, TaskModel) else model
        with head_inputs(backbone) as inputs:
            backbone(batch.inputs)
        return inputs[0]

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """The inputs of `predictions` for a batch with unknown targets."""
        return model(batch.inputs)

    def predictions(self, outputs: Any, classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """Name the model's outputs for each image, JSON-able: `predicted`, the classes by name, and `probabilities` of
        the `top` likeliest, in order. Raises UserError if the task does not support it."""
        raise UserError(f"The task {self.name} does not name its outputs: give it `predictions` (docs/tasks.md).")

    def draw(self, image: NDArray[np.uint8], shown: Any, classes: tuple[str, ...]) -> NDArray[np.uint8] | None:
        """Draw an annotation, or an entry of `predictions`, into an image uint8 (H, W, 3) of a file; None if the task
        does not draw."""
        return None

    def annotate(self, out: Path, images: Sequence[Predicted], classes: tuple[str, ...]) -> None:
        """Write predictions to `out`, a file or a new folder, in a format of annotations."""
        raise UserError(f"The task {self.name} writes no annotations: leave --annotations out.")

    def legend(self, classes: tuple[str, ...]) -> dict[str, str]:
        """Class -> its color, as #rrggbb, in `draw` and in the examples of an evaluation; empty without colors."""
        return {}


def make_task(name: str, recipe: Recipe) -> Task:
    """The task of this name for a recipe. Raises UserError for an unknown name or unsupported settings."""
    kind, usual, settings = TASKS[name], Recipe().settings(), recipe.settings()
    if ignored := [field for field in kind.ignored_fields() if settings[field] != usual[field]]:
        raise UserError(
            f"The task {name} does not read {ignored[0]} of the recipe, which is {settings[ignored[0]]!r}: leave it at "
            f"{usual[ignored[0]]!r}."
        )
    return kind.from_recipe(recipe)


class TaskModel(nn.Module):
    """A backbone with the modules that a task adds; subclasses define the forward.

    Submodules other than `backbone` are the task's: saved in a separate file, trained at `lr_scales` times the learning
    rate (default 1), and of the role `roles` (default head) for recipes that train only some roles.
    """

    also_forward: ClassVar[tuple[str, ...]] = ()
    """further methods that a task calls: weights that are sharded among processes are gathered for them"""
    lr_scales: ClassVar[Mapping[str, float]] = {}
    roles: ClassVar[Mapping[str, str]] = {}

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def no_weight_decay(self) -> set[str]:
        """Names of parameters of the task's own modules that are matrices but do not decay, such as positions."""
        return set()

    @property
    def vit_config(self) -> Any:
        """The backbone's; None unless it is vitmods' ViT."""
        return getattr(self.backbone, "vit_config", None)

    @property
    def changes(self) -> Any:
        """The backbone's."""
        return self.backbone.changes

    def get_classifier(self) -> nn.Module:
        """The backbone's."""
        head: nn.Module = self.backbone.get_classifier()  # type: ignore[operator]
        return head


def noise(count: int, shape: tuple[int, int, int]) -> Tensor:
    """Return images of noise, float32 (count, C, H, W), always the same."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def likeliest(p: Tensor, classes: tuple[str, ...], top: int) -> list[dict[str, float]]:
    """Return the `top` largest probabilities of each row (B, K) by class name, in descending order."""
    values, places = p.topk(min(top, p.shape[1]), dim=1)
    rows = zip(places.tolist(), values.tolist(), strict=True)
    return [{classes[k]: value for k, value in zip(*row, strict=True)} for row in rows]


def on_cpu(columns: Mapping[str, list[Tensor]]) -> dict[str, NDArray[Any]]:
    """Concatenate columns of several batches into arrays (n,) on the CPU."""
    return {name: np.asarray(torch.cat(parts).cpu()) for name, parts in columns.items()}
