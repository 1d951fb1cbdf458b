"""A study as users write it: arms times seeds on one data set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vitmods.model.config import ViTConfig
from vitmods.model.names import MODELS, parse_name
from vitmods.recipes import Recipe
from vitmods.recipes.recipe import fields_by_name
from vitmods.recipes.registry import split_recipe
from vitmods.recipes.schedule import WARMUPS
from vitmods.study.arms import BASE, FunctionSpec, base_function, is_foreign, make_arms
from vitmods.study.cells import ImageOptions
from vitmods.study.checkpoints import arms_in, seeds_of, use_trained_arms
from vitmods.study.defaults import Defaults, RecipeChoice, defaults_for
from vitmods.study.executors import StudyOptions
from vitmods.study.plan import SAYS_BASE, SEEDS, Rung, Settings, StudySettings, check_plan, make_seeds
from vitmods.util.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from vitmods.model.vit import Resampling
    from vitmods.study.answer import Answer
    from vitmods.study.budget import Budget
    from vitmods.study.estimate import Estimate
    from vitmods.study.reference import Reference
    from vitmods.study.retrain import Retrained
    from vitmods.study.run import Request

T = TypeVar("T", bound=StudyOptions | StudySettings | ImageOptions)
FRESH = 5_000  # the first seed with which a best combination is confirmed
USUAL_OPTIONS, USUAL_SETTINGS, USUAL_IMAGES = StudyOptions(), StudySettings(), ImageOptions()


class Study:
    """Compares arms with base on the same seeds.

    Args:
        base: a size name (`S/16`), a timm name or a ViTConfig; any other model as `timm:NAME`, `torchvision:NAME`,
            `hf:FOLDER`, or a function (num_classes, img_size, in_chans) -> nn.Module (docs/any-model.md); None: a ViT
            that fits the images.
        arms: name -> changes (or their short form) or a function model -> model, or a list of short forms, each
            `CHANGES` or `NAME=CHANGES`. Of a folder of checkpoints, their names; none: all. None: base alone, for
            `run_base`.
        data: `digits`, a folder, `torchvision:NAME?root=...` or `hf:NAME`.
        recipe: how every trial is trained, or its name with settings (`augreg(level=light1)`); None: one that fits the
            images, or `finetune` with `start`.
        seeds: how many, or which; None: those that `start` has, or 5 (with more folds, as many as those), or at most 16
            of a study that runs until it is decided; 3, or at most 8, of a factorial one.
        task: what is trained and measured, a name of `vitmods.tasks.TASKS` (docs/tasks.md).
        start: trained weights that every arm starts from (docs/finetune.md); they say what base is. A folder of several
            checkpoints, as a study's, is one for each arm. None: new ones.
        positions: how the positions of `start` are resampled to other image sizes: as timm (`bicubic`) or big_vision
            (`bilinear`).
        budget: what runs may take by default, as in `run`. As "2h" it also chooses model, image size and length of the
            training as far as they are None (docs/study.md).
        settings: metric, margin, design, tuning, sweep, folds: see `vitmods.study.StudySettings`.
        options: fields of `settings` and of `vitmods.study.ImageOptions`, as in `Study(..., metric="ece", img_size=32,
            sweep={"limit_train": [0.25, 1]})`.

    Raises:
        UserError: a value that cannot be used; the message says what to do.
    """

    def __init__(
        self,
        base: str | ViTConfig | Callable[..., nn.Module] | None = None,
        arms: Mapping[str, Any] | Iterable[Any] | None = (),
        data: str | Path = "digits",
        recipe: Recipe | RecipeChoice | str | None = None,
        seeds: int | Iterable[int] | None = None,
        *,
        task: str = "classification",
        start: str | Path | None = None,
        positions: Resampling = "bicubic",
        budget: str | int | Budget | None = None,
        settings: StudySettings = USUAL_SETTINGS,
        images: ImageOptions = USUAL_IMAGES,
        **options: Any,
    ):
        names = {field.name for field in fields(StudySettings)}
        chosen = {name: options.pop(name) for name in names.intersection(options)}
        settings = override(settings, chosen)
        images = override(images, options, "a study or its images", names)
        trained = {} if start is None else arms_in(str(start))
        start = trained[BASE].start if trained else start
        of_start = [] if start is None else seeds_of(str(start))
        chosen_seeds = make_seeds((of_start or settings.usual_seeds) if seeds is None else seeds)
        # Arms are made before the images, which may be many, are listed.
        chosen_arms = () if arms is None else make_arms(use_trained_arms(arms, trained) if trained else arms)
        self._common = base, data, recipe, images, task, start, positions
        fixed, self._defaults, self._recipe_note = fixed_settings(
            base, data, recipe, images, task=task, start=start, positions=positions
        )
        self._seeds_given, self._budget = seeds is not None, budget
        unset = open_settings(base, recipe, images, start)
        self.settings = Settings(fixed, chosen_arms, chosen_seeds, **vars(settings), open=unset)
        check_plan(self.settings)
        base_recipe = self.settings.cell(BASE).recipe
        for arm in self.settings.arms:
            if not arm.changes and arm.start is None and self.settings.cell(arm.name).recipe == base_recipe:
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
        budget: str | int | Budget | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Answer:
        """Run what is missing in the folder `out` and return the answer, which is also written to `out`.

        Calling it again resumes the study and changes nothing that is finished. Nothing but `out` is part of the study,
        so the other arguments may differ from call to call.

        Args:
            out: the study's folder, made if needed.
            budget: limit of this run: "2h", "30m" (trials that are expected to end later do not start), or a
                number of trials; None: that of the study, else unlimited. Without `seeds`, as many as fit are
                planned, at least 3, and the last one may end up to a tenth of the time later. A new study also
                takes model, image size and epochs that fit, as far as they were not given.
            command: the shell command that the report names; None: the Python call.
            options: device, workers, memory, loggers, cluster: see `vitmods.study.StudyOptions`.
            overrides: fields of `options`, as in `run(out, device="cpu", workers=2)`.

        Raises:
            UserError: another run holds the folder, it holds another study, or something cannot be used as given.
            KeyboardInterrupt: a signal came; what was trained is saved.
        """
        from vitmods.study.run import run_study

        if not self.settings.arms:
            raise UserError("A study compares arms with base: name some, or train base alone with run_base.")
        return run_study(*self._arguments(out, budget, options, overrides), command)

    def confirm(self, out: str | Path, seeds: int = SEEDS[None], **options: Any) -> Answer:
        """Train the best combination that a factorial study in `out` predicts against base, on fresh seeds.

        It is another study, in a folder below `out`; the answer of the factorial one has its effect as the question
        `confirmed`.

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
        if plan is None:
            raise UserError('Only the best combination of a factorial study is confirmed: design="factorial".')
        if not answer.complete:
            raise UserError(f"{out} is not finished: run it first, so that the best combination is known.")
        if not answer.headline.together:
            raise UserError("No change is predicted to help: a combination to confirm does not exist.")
        arm = plan.run(answer.headline.together)
        study = copy(self)
        study._seeds_given = True
        study.settings = replace(
            self.settings.continuing(StudyFolder(out).known_facts().settings),
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

        request, path, options = self._arguments(out, None, options, overrides)
        return retrain_study(request.settings, path, arm, seed, options)

    def dry_run(
        self,
        out: str | Path | None = None,
        *,
        budget: str | int | Budget | None = None,
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
        budget: str | int | Budget | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Estimate:
        """Train base alone on the first four seeds, which count as trials of the study; then estimate with
        the variance now known. Arguments and errors are those of `run`."""
        from vitmods.study.run import run_pilot

        return run_pilot(*self._arguments(out, budget, options, overrides), command)

    def run_base(
        self,
        out: str | Path,
        *,
        budget: str | int | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Reference:
        """Train base alone on all seeds, as the reference of later studies next to `out`, which reuse its trials.

        Returns its scores, spread, curve and time, which are also written to base.json. Arguments and errors are those
        of `run`.
        """
        from vitmods.study.run import run_base

        return run_base(*self._arguments(out, budget, options, overrides), command)

    def _arguments(
        self, out: str | Path, budget: str | int | Budget | None, options: StudyOptions, overrides: Mapping[str, Any]
    ) -> tuple[Request, Path, StudyOptions]:
        from vitmods.study.budget import make_budget
        from vitmods.study.run import Request

        options = override(options, overrides)
        options.check_here(cell.recipe.precision for cell in self.settings.cells)
        limit = make_budget(self._budget if budget is None else budget)
        request = Request(self.settings, limit, self._seeds_given, self._recipe_note, self._rungs)
        return request, Path(out), options

    def _rungs(self) -> list[Rung]:
        """List the study with each model and image size that a time budget is tried with."""
        base, data, recipe, images, task, start, positions = self._common
        count, pixels = self._defaults.images, self._defaults.side
        from vitmods.tasks.base import TASKS

        rungs: list[tuple[Any, Any]] = [(base, images.img_size)]
        if start is None and isinstance(base, str | None) and TASKS[task].uses_head:
            sides = (images.img_size,) if isinstance(images.img_size, int) else images.img_size
            rungs = list(self._defaults.rungs(base, sides))
        studies = []
        for name, side in rungs:
            resized = replace(images, img_size=side)
            with suppress(UserError):  # the recipe, the task or the model does not suit this size
                fixed, _, note = fixed_settings(
                    name, data, recipe, resized, task=task, start=start, positions=positions, defaults=self._defaults
                )
                studies.append(Rung(replace(self.settings, fixed=fixed), note, count, pixels))
        return studies or [Rung(self.settings, self._recipe_note, count, pixels)]


def override(options: T, overrides: Mapping[str, Any], what: str = "a run", others: Iterable[str] = ()) -> T:
    """Replace fields of options by name. Raises TypeError, naming the nearest, for other names."""
    names = {field.name for field in fields(options)}
    for name in overrides:
        if name not in names:
            raise TypeError(f"{name!r} is not an option of {what}. {nearest(name, [*names, *others])}")
    return replace(options, **overrides)


def open_settings(
    base: Any, recipe: Recipe | RecipeChoice | str | None, images: ImageOptions, start: str | Path | None
) -> frozenset[str]:
    """Return the names of settings, and of fields of the recipe, that are not given."""
    unset = {name for name in ("img_size", "in_chans") if getattr(images, name) is None}
    unset |= {"base"} if base is None and start is None else set()
    choice = RecipeChoice(recipe) if isinstance(recipe, str | None) else recipe
    if not isinstance(choice, RecipeChoice):
        return frozenset(unset)
    of_recipe = set(fields_by_name()) if choice.name is None else {"epochs", "steps", *WARMUPS}
    closed = {*choice.overrides, *(split_recipe(choice.name)[1] if choice.name else ())}
    if {"epochs", "steps"} & closed:  # the warm-up follows it
        closed |= {"epochs", "steps", *WARMUPS}
    return frozenset(unset | of_recipe - closed)


def fixed_settings(
    base: str | ViTConfig | Callable[..., nn.Module] | None,
    data: str | Path,
    recipe: Recipe | RecipeChoice | str | None,
    images: ImageOptions = USUAL_IMAGES,
    *,
    task: str = "classification",
    start: str | Path | None = None,
    positions: Resampling = "bicubic",
    defaults: Defaults | None = None,
) -> tuple[dict[str, Any], Defaults, str]:
    """Return what every trial of a study has in common, in JSON's types; None becomes what fits the images.

    Also returns what fits the images (`defaults`, if it is known), and the recipe that was chosen, with the reason.
    """
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
        raise UserError(f"{SAYS_BASE}: drop --base.")
    if isinstance(recipe, str | None):
        recipe = RecipeChoice(recipe)
    if isinstance(recipe, Recipe):
        make_task(task, recipe)  # a UserError where it does not suit the task, before the images are listed
    elif not isinstance(recipe, RecipeChoice):
        raise UserError(f"recipe is a Recipe, as vm.recipes.default() gives it, or a name, not {recipe!r}.")
    suited = defaults = defaults or defaults_for(str(data), images.limit_train)
    started, pixels, reason = {}, {}, ""
    named_model = base if isinstance(base, str) else defaults.base if base is None else None
    if start is not None:
        from vitmods.study.checkpoints import Start  # imports torch, so only here: --help does without

        trained, checkpoint, base = Start.of(str(start), positions)
        started["start"], named_model, shape = asdict(trained), None, checkpoint.settings
        defaults = replace(defaults, img_size=tuple(shape["img_size"]), in_chans=shape["in_chans"])
        pixels = {name: tuple(getattr(checkpoint.recipe.augment, name)) for name in ("mean", "std")}
    size = defaults.img_size if images.img_size is None else images.img_size
    sides = (size,) if isinstance(size, int) else tuple(size)
    if isinstance(recipe, RecipeChoice):
        recipe, reason = recipe.resolve(kind, defaults, max(sides), named_model, pixels)
    base = defaults.base if base is None else base
    chosen = {field.name: getattr(images, field.name) for field in fields(ImageOptions)}
    chosen |= {"img_size": [sides[0], sides[-1]]}
    chosen |= {"in_chans": defaults.in_chans if images.in_chans is None else images.in_chans}
    made = make_task(task, recipe)
    made.check_size((sides[0], sides[-1]))  # a UserError where they do not suit the task
    if made.needs_trained_backbone and start is None and not (isinstance(base, str) and "pretrained=1" in base):
        raise UserError(
            f"With this recipe the task {task} does not train the model itself: start from trained weights (--from in "
            "`vitmods compare`, --model in `vitmods finetune`)."
        )
    recorded = {name: value for name, value in chosen.items() if value is not None or name.startswith("limit_")}
    settings = {"task": task, "data": str(data), **recorded, **started}
    settings |= {"base": base if isinstance(base, str) else json.loads(base.to_json()), "recipe": recipe.to_dict()}
    in_json: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    if isinstance(base, FunctionSpec):
        in_json["base"] = base  # which remembers its function
    return in_json, suited, reason
