"""What a task is: all that the loop, the study and the report ask about what is trained and how it is measured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitmods.data.batch import Batch
from vitmods.data.dataset import AnySplit, Joint, JointView
from vitmods.data.loading import load
from vitmods.recipes import TASK_PARTS, Recipe, TaskPart
from vitmods.recipes.recipe import fields_by_name
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.registry import Registry

DEFAULT = "classification"
Splits = Sequence[AnySplit]
TASKS: Registry[type["Task"]] = Registry("task", "vitmods.tasks", "vitmods.tasks.*.task")
"""name -> Task. A file adds its own with `@TASKS.register("name")`, here or in a plugin."""


@dataclass(frozen=True)
class Example:
    """An evaluated image to look at: its position in the split, and drawings uint8 (H, W, 3) of one size by name, of
    them "image", "annotation" and "prediction"."""

    index: int
    panels: Mapping[str, NDArray[np.uint8]]


@dataclass(frozen=True)
class Measured:
    """What an evaluation gives.

    metrics: the task's, by their names, and `loss`. per_image: (n,) arrays in the order of the images, among them one
    for each metric that is a mean over images; empty where nothing can be said of a single image. `predicted` among
    them is the number of the class that is predicted for all of an image (-1: there are several): a trial with one
    class for all images has learned nothing. examples: a few of the images, where something can be drawn of them.
    detail: what is known of each class, by name: lists with an entry a class, JSON-able.
    """

    metrics: dict[str, float]
    per_image: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    detail: Mapping[str, list[Any]] = field(default_factory=dict)


class Predicted(NamedTuple):
    """An image and its entry of `predictions`. name: unique, for a file; size: height and width in the image's file."""

    name: str
    path: Path
    size: tuple[int, int]
    prediction: Mapping[str, Any]


class Task(ABC):
    """What is trained, and how it is measured; one object a trial, made from the trial's recipe.

    Only `loss`, `evaluate` and `synthetic` must be written. A task that keeps something from step to step (a teacher,
    a running center, the generator of its masks) makes it in `begin` and gives it to the checkpoints by `state_dict`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    """what it does, in a few words"""
    target: ClassVar[str] = "class"
    """what it asks the data for, of each image: "class", "labels" (any number of them), "nothing" (images alone, of one
    class or in no class folder), or another name of `vitmods.data.multilabel.TARGETS` or of a source of the user's"""
    inputs: ClassVar[str] = "images"
    """what its model reads; a task with another word here has `load_data` and `read_files` of its own"""
    metrics: ClassVar[tuple[Metric, ...]]
    """of `evaluate`; trials are compared by the first unless the user names another"""
    usual_recipe: ClassVar[str | None] = None
    """the recipe that training starts from if none is named; None: what fits the images"""
    recipe_part: ClassVar[type[TaskPart] | None] = None
    """the part of the recipe that this task alone reads; see `vitmods.recipes.TASK_PARTS`"""
    unread: ClassVar[tuple[str, ...]] = ()
    """fields of the other parts that the task does not read: `make_task` refuses them"""
    divides: ClassVar[bool] = True
    """whether `evaluate` calls nothing of its model but `model(inputs)`, whose outputs several processes can share;
    otherwise each of them evaluates all images"""
    hub_tag: ClassVar[str | None] = None
    """what the Hugging Face Hub calls such tasks"""
    uses_head: ClassVar[bool] = True
    """whether the backbone keeps its head, with as many outputs as the data has classes; without, it is taken off
    before `wrap`"""

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """The task with the recipe's loss. Raises UserError where the recipe sets what the task cannot do."""
        return cls()

    @classmethod
    def fitted(cls, recipe: Recipe) -> Recipe:
        """Adapt a recipe that was not made for this task: fields that it does not read get their defaults."""
        usual = Recipe().settings()
        return recipe.with_(**{name: usual[name] for name in cls.ignored_fields()})

    @classmethod
    def ignored_fields(cls) -> list[str]:
        """`unread`, and the fields of other tasks' parts."""
        others = {name for name, kind in TASK_PARTS.items() if kind is not cls.recipe_part}
        return [*cls.unread, *(name for name, (part, *_) in fields_by_name().items() if part in others)]

    @property
    def metric(self) -> str:
        """The metric that trials are compared by."""
        return self.metrics[0].name

    @classmethod
    def constant_scores(cls, splits: Splits, classes: int) -> dict[str, float]:
        """Return the score of the best prediction that ignores the images, by each metric where it is known: for top-1
        the share of the most frequent class. Trials that are not above it have learned nothing (docs/verdicts.md).

        Args:
            splits: the images that trials are compared on.
            classes: how many the task has.
        """
        return {}

    @property
    def joint(self) -> Joint | None:
        """The function that augments images and targets together; None: images are augmented alone, and mixed, as the
        recipe says. A class may set it to a staticmethod."""
        return None

    @property
    def joint_view(self) -> JointView | None:
        """The function that prepares them together for evaluation; None: images are resized and cropped alone. To
        predict, annotations are None."""
        return None

    def load_data(self, spec: str, **options: Any) -> Any:
        """Read the data set of `spec`; options: those of `vitmods.data.load` but target and joint views."""
        return load(spec, target=self.target, joint=self.joint, joint_view=self.joint_view, **options)

    def read_files(self, paths: Sequence[Path], data: Mapping[str, Any], longest: int) -> dict[str, Tensor]:
        """Named inputs of files to predict, for a task that does not read images.

        Args:
            paths: the files.
            data: what config.json of the trial says of its data.
            longest: the second side of img_size.
        """
        raise UserError(f"The task {self.name} cannot read files to predict: give it `read_files` (docs/tasks.md).")

    def stack(self, inputs: Sequence[Tensor]) -> Tensor:
        """Inputs of `read_files` as one batch."""
        return torch.stack(list(inputs))

    def wrap(self, backbone: nn.Module, classes: int) -> nn.Module:
        """The trained model for so many classes: the backbone itself, or a TaskModel with modules beside it,
        initialized from torch's random numbers, which are seeded."""
        return backbone

    def check_size(self, img_size: tuple[int, int]) -> None:  # noqa: B027 - most tasks take any
        """Raise UserError where images of this size (rows, columns) do not suit the task's settings."""

    def begin(self, model: nn.Module) -> None:  # noqa: B027 - most tasks keep nothing
        """Before the first step, also of a resumed trial, with the model on its device."""

    def after_step(self, model: nn.Module, step: int, steps: int) -> None:  # noqa: B027
        """After the optimizer made step number `step` (from 1) of `steps`."""

    def state_dict(self) -> dict[str, Any]:
        """What `begin` made and later steps depend on; tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, after `begin`."""
        assert not state, f"{self.name} keeps nothing"

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss over the images of `batch`, and 0-d statistics for the log, also means over the images."""

    @abstractmethod
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Measured:
        """Metrics over all images of `batches`. Raises UserError where there are none."""

    @abstractmethod
    def synthetic(self, count: int, shape: tuple[int, int, int], classes: int, recipe: Recipe) -> Batch:
        """A batch of noise that costs what a real one does: `count` images of `shape` (C, H, W), and their targets."""

    def outputs(self, model: nn.Module, batch: Batch) -> Any:
        """What `predictions` reads, of a batch whose targets are not known."""
        return model(batch.inputs)

    def predictions(self, outputs: Any, classes: tuple[str, ...], top: int = 5) -> list[dict[str, Any]]:
        """What the model's outputs say of each image, JSON-able: `predicted`, the classes by name, and `probabilities`
        of the `top` likeliest, the first first. Raises UserError for a task that does not name its outputs."""
        raise UserError(f"The task {self.name} does not name its outputs: give it `predictions` (docs/tasks.md).")

    def draw(self, image: NDArray[np.uint8], shown: Any, classes: tuple[str, ...]) -> NDArray[np.uint8] | None:
        """An image uint8 (H, W, 3) as it is in its file with what an annotation, or an entry of `predictions`, says of
        it drawn into it; None for a task that has nothing to draw."""
        return None

    def annotate(self, out: Path, images: Sequence[Predicted], classes: tuple[str, ...]) -> None:
        """Write predictions to `out`, a file or a new folder, in a format of annotations."""
        raise UserError(f"The task {self.name} writes no annotations: leave --annotations out.")

    def legend(self, classes: tuple[str, ...]) -> dict[str, str]:
        """Class -> its color, as #rrggbb, in `draw` and in the examples of an evaluation; empty: they have none."""
        return {}


def make_task(name: str, recipe: Recipe) -> Task:
    """The task of that name for a recipe. Raises UserError where there is none, or the recipe sets what it does not
    read, or what it cannot do."""
    kind, usual, settings = TASKS[name], Recipe().settings(), recipe.settings()
    if ignored := [field for field in kind.ignored_fields() if settings[field] != usual[field]]:
        raise UserError(
            f"The task {name} does not read {ignored[0]} of the recipe, which is {settings[ignored[0]]!r}: leave it at "
            f"{usual[ignored[0]]!r}."
        )
    return kind.from_recipe(recipe)


class TaskModel(nn.Module):
    """A backbone with the modules that a task puts beside it. A task's own model is a subclass with a forward.

    Submodules other than `backbone` are the task's: saved in a file of their own beside the backbone's weights, trained
    at `lr_scales` times the learning rate (1 where nothing is said), and of the role `roles` (head where nothing is
    said) where a recipe trains some roles alone.
    """

    also_forward: ClassVar[tuple[str, ...]] = ()
    """methods beside `forward` that a task calls: weights that are divided among processes are made whole for them"""
    lr_scales: ClassVar[Mapping[str, float]] = {}
    roles: ClassVar[Mapping[str, str]] = {}

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    @property
    def vit_config(self) -> Any:
        """The backbone's; None for other models than vitmods' ViT."""
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
    """Images of noise, float32 (count, C, H, W), always the same."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def likeliest(p: Tensor, classes: tuple[str, ...], top: int) -> list[dict[str, float]]:
    """Of each row of probabilities (B, K) the `top` largest by name, the first first."""
    values, places = p.topk(min(top, p.shape[1]), dim=1)
    rows = zip(places.tolist(), values.tolist(), strict=True)
    return [{classes[k]: value for k, value in zip(*row, strict=True)} for row in rows]


def on_cpu(columns: Mapping[str, list[Tensor]]) -> dict[str, NDArray[Any]]:
    """Columns that grew batch by batch on the device, as arrays (n,)."""
    return {name: np.asarray(torch.cat(parts).cpu()) for name, parts in columns.items()}
