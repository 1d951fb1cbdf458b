"""A study as users write it: arms times seeds on one data set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitmods.model.config import ViTConfig
from vitmods.model.names import MODELS, parse_name
from vitmods.recipes import Recipe
from vitmods.study.arms import BASE, FunctionSpec, base_function, is_foreign, make_arms
from vitmods.study.checkpoints import arms_in, use_trained_arms
from vitmods.study.defaults import RecipeChoice, defaults_for
from vitmods.study.executors import StudyOptions
from vitmods.study.plan import ImageOptions, Settings, StudySettings, check_plan, make_seeds
from vitmods.util.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from vitmods.model.vit import Resampling
    from vitmods.study.answer import Answer
    from vitmods.study.estimate import Estimate
    from vitmods.study.retrain import Retrained
    from vitmods.study.schedule import Budget

T = TypeVar("T", bound=StudyOptions | StudySettings | ImageOptions)
SEEDS, MOST = {None: 5, "factorial": 3}, {None: 16, "factorial": 8}
"""By default, for each design: of a fixed study, and at most of one that runs until it is decided."""
FRESH = 5_000  # the first seed with which a best combination is confirmed
USUAL_OPTIONS, USUAL_SETTINGS, USUAL_IMAGES = StudyOptions(), StudySettings(), ImageOptions()


class Study:
    """Compares arms with base on the same seeds.

    Args:
        base: a size name (`S/16`), a timm name or a ViTConfig; any other model as `timm:NAME`, `torchvision:NAME`,
            `hf:FOLDER`, or a function (num_classes, img_size, in_chans) -> nn.Module (docs/any-model.md); None: a ViT
            that fits the images.
        arms: name -> changes (or their short form) or a function model -> model, or a list of short forms, each
            `CHANGES` or `NAME=CHANGES`. Of a folder of checkpoints, their names; none: all.
        data: `digits`, a folder, `torchvision:NAME?root=...` or `hf:NAME`.
        recipe: how every trial is trained, or its name with settings (`augreg(level=light1)`); None: one that fits the
            images, or `finetune` with `start`.
        seeds: how many, or which; None: 5 (with more folds, as many as those), or at most 16 of a study that runs until
            it is decided; 3, or at most 8, of a factorial one.
        task: what is trained and measured, a name of `vitmods.tasks.TASKS` (docs/tasks.md).
        start: trained weights that every arm starts from (docs/finetune.md); they say what base is. A folder of several
            checkpoints, as a study's, is one for each arm. None: new ones.
        settings: metric, margin, design, tuning, sweep, folds: see `vitmods.study.StudySettings`.
        options: fields of `settings` and of `vitmods.study.ImageOptions`, as in `Study(..., metric="ece", img_size=32,
            sweep={"limit_train": [0.25, 1]})`.

    Raises:
        UserError: a value that cannot be used; the message says what to do.
    """

    def __init__(
        self,
        base: str | ViTConfig | Callable[..., nn.Module] | None = None,
        arms: Mapping[str, Any] | Iterable[Any] = (),
        data: str | Path = "digits",
        recipe: Recipe | RecipeChoice | str | None = None,
        seeds: int | Iterable[int] | None = None,
        *,
        task: str = "classification",
        start: str | Path | None = None,
        settings: StudySettings = USUAL_SETTINGS,
        images: ImageOptions = USUAL_IMAGES,
        **options: Any,
    ):
        names = {field.name for field in fields(StudySettings)}
        chosen = {name: options.pop(name) for name in names.intersection(options)}
        settings = override(settings, chosen)
        images = override(images, options, "a study or its images", names)
        design = "factorial" if settings.design else None
        usual_seeds = max((MOST if settings.until_decided else SEEDS)[design], settings.folds or 0)
        chosen_seeds = make_seeds(usual_seeds if seeds is None else seeds)
        trained = {} if start is None else arms_in(str(start))
        # Arms are made before the images, which may be many, are listed.
        chosen_arms = make_arms(use_trained_arms(arms, trained) if trained else arms)
        start = trained[BASE].start if trained else start
        fixed = fixed_settings(base, data, recipe, images, task=task, start=start)
        self._seeds_given = seeds is not None
        self.settings = Settings(fixed, chosen_arms, chosen_seeds, **vars(settings))
        check_plan(self.settings)
        for arm in self.settings.arms:
            if not arm.changes and arm.start is None and self.settings.recipe_of(arm) == self.settings.recipe:
                raise UserError(f"Arm {arm.name} ({arm.text}) is base itself, part of every study: leave it out.")

    def __repr__(self) -> str:
        fixed = self.settings.fixed
        base = fixed["base"] if isinstance(fixed["base"], str) else "ViTConfig(...)"
        base = fixed["start"]["source"] if "start" in fixed else base
        names = ", ".join(arm.name for arm in self.settings.factors)
        return f"Study({base} against {names} on {fixed['data']}, {self.settings.planned} trials)"

    def run(
        self,
        out: str | Path,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Answer:
        """Run what is missing in the folder `out` and return the answer, which is also written to `out`.

        Calling it again resumes the study and changes nothing that is finished. Nothing but `out` is part of the study,
        so the other arguments may differ from call to call.

        Args:
            out: the study's folder, made if needed.
            budget: limit of this run: "2h", "30m" (trials that are expected to end later do not start), or a number of
                trials; None: unlimited. Without `seeds`, as many as fit are planned, at least 3.
            command: the shell command that the report names; None: the Python call.
            options: device, workers, memory, loggers, cluster: see `vitmods.study.StudyOptions`.
            overrides: fields of `options`, as in `run(out, device="cpu", workers=2)`.

        Raises:
            UserError: another run holds the folder, it holds another study, or something cannot be used as given.
            KeyboardInterrupt: a signal came; what was trained is saved.
        """
        from vitmods.study.run import run_study

        return run_study(*self._arguments(out, budget, options, overrides), command)

    def confirm(self, out: str | Path, seeds: int = SEEDS[None], **options: Any) -> Answer:
        """Train the best combination that a factorial study in `out` predicts against base, on fresh seeds.

        It is another study, in a folder below `out`; `Answer.confirmed` of the factorial one reports its effect.

        Args:
            out: the factorial study's folder.
            seeds: how many.
            options: those of `run`.

        Raises:
            UserError: the study is not factorial or not finished, or no change is predicted to help.
        """
        from vitmods.study.answer import Answer
        from vitmods.study.store import StudyFolder

        answer, plan = Answer.load(out), self.settings.design
        if plan is None or answer.factorial is None:
            raise UserError('Only the best combination of a factorial study is confirmed: design="factorial".')
        if not answer.complete:
            raise UserError(f"{out} is not finished: run it first, so that the best combination is known.")
        if not answer.factorial.best:
            raise UserError("No change is predicted to help: a combination to confirm does not exist.")
        arm = plan.run(answer.factorial.best)
        study = copy(self)
        study._seeds_given = True
        study.settings = replace(
            self.settings,
            arms=(arm,),
            seeds=make_seeds(range(FRESH, FRESH + seeds)),
            until_decided=False,
            design=None,
            runs=None,
        )
        return study.run(StudyFolder(out).confirmation(arm.name).path, **options)

    def retrain(
        self,
        out: str | Path,
        arm: str = "best",
        seed: int = 0,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Retrained:
        """Train one arm of the finished study in `out` on all images, including val and test, to deploy it.

        It is in `out`/retrained/ARM, and another call resumes it. Its quality cannot be measured on images that it was
        trained on: the study's own score is the estimate.

        Args:
            out: the study's folder.
            arm: which, at its chosen point where the study was tuned. "best": the cheapest of the arms that help and
                may be best, or base where none helps.
            seed: of this training.
            options, overrides: those of `run`.

        Raises:
            UserError: the study is not finished, or is another one.
        """
        from vitmods.study.retrain import retrain_study

        settings, path, options, *_ = self._arguments(out, None, options, overrides)
        return retrain_study(settings, path, arm, seed, options)

    def dry_run(
        self,
        out: str | Path | None = None,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Estimate:
        """Estimate trials, sizes, time (by a few timed steps), disk and detectable effects of `run`; writes nothing.

        Trials that are finished in `out` do not count; the variance follows from them, or from studies next to `out`.
        Arguments and errors are those of `run`; with a budget it estimates the study that `run` would plan for it.
        """
        from vitmods.study.run import dry_run

        return dry_run(*self._arguments(out or os.devnull, budget, options, overrides), command)

    def pilot(
        self,
        out: str | Path,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Estimate:
        """Train base alone on the first four seeds, which count as trials of the study; then estimate with
        the variance now known. Arguments and errors are those of `run`."""
        from vitmods.study.run import run_pilot

        return run_pilot(*self._arguments(out, budget, options, overrides), command)

    def _arguments(
        self, out: str | Path, budget: str | int | None, options: StudyOptions, overrides: Mapping[str, Any]
    ) -> tuple[Settings, Path, StudyOptions, Budget, bool]:
        from vitmods.study.schedule import make_budget

        options = override(options, overrides)
        options.check_here()
        return self.settings, Path(out), options, make_budget(budget), self._seeds_given


def override(options: T, overrides: Mapping[str, Any], what: str = "a run", others: Iterable[str] = ()) -> T:
    """Replace fields of options by name. Raises TypeError, naming the nearest, for other names."""
    names = {field.name for field in fields(options)}
    for name in overrides:
        if name not in names:
            raise TypeError(f"{name!r} is not an option of {what}. {nearest(name, [*names, *others])}")
    return replace(options, **overrides)


def fixed_settings(
    base: str | ViTConfig | Callable[..., nn.Module] | None,
    data: str | Path,
    recipe: Recipe | RecipeChoice | str | None,
    images: ImageOptions = USUAL_IMAGES,
    *,
    task: str = "classification",
    start: str | Path | None = None,
    positions: Resampling = "bicubic",
) -> dict[str, Any]:
    """Return what every trial of a study has in common, in JSON's types; None becomes what fits the images."""
    from vitmods.tasks.base import TASKS, make_task

    kind = TASKS[task]
    if not isinstance(base, str | ViTConfig | None):
        if hasattr(base, "forward") or not callable(base):
            raise UserError(
                f"base is a ViT's name, a ViTConfig, or a function (num_classes, img_size, in_chans) -> nn.Module that "
                f"makes new models, not a {type(base).__name__}: every trial starts with the weights of its seed."
            )
        base = FunctionSpec.of(base)
    if function := base_function(base):
        function.load()
    if isinstance(base, str) and not is_foreign(base) and base not in MODELS:
        parse_name(base)
    if start is not None and base is not None:
        raise UserError("The checkpoint that training starts from says what base is: leave base out.")
    if isinstance(recipe, str | None):
        recipe = RecipeChoice(recipe)
    if isinstance(recipe, Recipe):
        make_task(task, recipe)  # a UserError where it does not suit the task, before the images are listed
    elif not isinstance(recipe, RecipeChoice):
        raise UserError(f"recipe is a Recipe, as vm.recipes.default() gives it, or a name, not {recipe!r}.")
    defaults, started, pixels = defaults_for(str(data)), {}, {}
    named_model = base if isinstance(base, str) else defaults.base if base is None else None
    if start is not None:
        from vitmods.study.checkpoints import Start  # imports torch, so only here: --help does without

        trained, checkpoint, base = Start.of(str(start), positions)
        started["start"], named_model, shape = asdict(trained), None, checkpoint.settings
        defaults = replace(defaults, img_size=tuple(shape["img_size"]), in_chans=shape["in_chans"])
        pixels = {name: tuple(getattr(checkpoint.recipe.augment, name)) for name in ("mean", "std")}
    if isinstance(recipe, RecipeChoice):
        recipe = recipe.resolve(kind, defaults, named_model, pixels)
    base = defaults.base if base is None else base
    size = defaults.img_size if images.img_size is None else images.img_size
    sides = (size,) if isinstance(size, int) else tuple(size)
    chosen = {field.name: getattr(images, field.name) for field in fields(ImageOptions)}
    chosen |= {"img_size": [sides[0], sides[-1]]}
    chosen |= {"in_chans": defaults.in_chans if images.in_chans is None else images.in_chans}
    make_task(task, recipe).check_size((sides[0], sides[-1]))  # a UserError where they do not suit the task
    recorded = {name: value for name, value in chosen.items() if value is not None or name.startswith("limit_")}
    settings = {"task": task, "data": str(data), **recorded, **started}
    settings |= {"base": base if isinstance(base, str) else json.loads(base.to_json()), "recipe": recipe.to_dict()}
    in_json: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    if isinstance(base, FunctionSpec):
        in_json["base"] = base  # which remembers its function
    return in_json
