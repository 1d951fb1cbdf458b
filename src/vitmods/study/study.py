"""A study as users write it: arms times seeds on one data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vitmods.model.config import ViTConfig
from vitmods.recipes import Recipe
from vitmods.recipes.registry import evidence, network
from vitmods.recipes.schedule import WARMUPS
from vitmods.study.arms import (
    BASE,
    PROMISING,
    Arm,
    is_foreign,
    is_promising,
    make_arms,
    table_of,
    with_matched_ranks,
)
from vitmods.study.cells import ImageOptions, make_cell
from vitmods.study.checkpoints import arms_in, check_weights_for, refuse_two_meanings, seeds_of, use_trained_arms
from vitmods.study.defaults import Defaults, RecipeChoice, defaults_for
from vitmods.study.design import DESIGNS, Design
from vitmods.study.executors import StudyOptions
from vitmods.study.fixed import USUAL_IMAGES, fixed_settings, one_spelling, open_settings, paper_of
from vitmods.study.settings import Rung, Settings, StudySettings, check_settings, make_seeds
from vitmods.util.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from vitmods.model.vit import Resampling
    from vitmods.study.answer import Answer
    from vitmods.study.budget import Budget
    from vitmods.study.estimate import Estimate
    from vitmods.study.retrain import Retrained
    from vitmods.study.run import Request
    from vitmods.study.stages import AnswerOverData, Estimates, TwoStages

T = TypeVar("T", bound=StudyOptions | StudySettings | ImageOptions)
FEWEST_PATCHES = 6  # on a side, of trained weights to which a time budget shows smaller images
FRESH = 5_000  # the first seed with which a best combination is confirmed
CLASSIFICATION = "classification"  # the task by default; `vitmods.tasks` imports torch
USUAL_OPTIONS, USUAL_SETTINGS = StudyOptions(), StudySettings()


class Study:
    """Compares arms with base on the same seeds.

    Args:
        base: a size name (`S/16`), a timm name or a ViTConfig; any other model as `timm:NAME`, `torchvision:NAME`,
            `hf:FOLDER`, or a function (num_classes, img_size, in_chans) -> nn.Module (docs/any-model.md); None: a ViT
            that fits the images. A list of names: arms are compared with each, as in a sweep over bases.
        arms: name -> changes (or their short form) or a function model -> model, or a list of short forms, each
            `CHANGES` or `NAME=CHANGES`. Of a folder of checkpoints, their names; none: all. None: base alone, whose
            trials studies next to it reuse. `promising`: the three changes that other studies found most promising for
            images and a base like these (docs/evidence.md). `paper:TABLE`: those of a published table, and its task,
            bases, sweep and metric unless they are given.
        data: `digits`, a folder, `torchvision:NAME?root=...` or `hf:NAME`.
        recipe: how every trial is trained, or its name with settings (`augreg(level=light1)`); None: one that fits the
            images, or `finetune` with `start`.
        seeds: how many, or which; None: those that `start` has, or 5 (with more folds, as many as those), or at most 16
            of a study that runs until it is decided; 3, or at most 8, of a factorial one.
        task: what is trained and measured, a name of `vitmods.tasks.TASKS` (docs/tasks.md); None: classification, or
            that of the table.
        start: trained weights that every arm starts from (docs/finetune.md); they say what base is. A folder of several
            checkpoints, as a study's, is one for each arm. None: new ones.
        positions: how the positions of `start` are resampled to other image sizes: as timm (`bicubic`) or big_vision
            (`bilinear`).
        pretrain: a task or a recipe with settings, as "beit(epochs=50,codes=512)", by which base and every arm are
            first trained without labels; they then start from these weights (docs/pretraining.md).
        pretrain_data: the images of that stage; None: those of `data`, all that `limit_train` leaves out too.
        match: `parameters` gives the adapters of arms `lora` and `dora` the rank with which they train as many
            parameters as `attention`.
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
        base: str | ViTConfig | Callable[..., nn.Module] | Sequence[str] | None = None,
        arms: Mapping[str, Any] | Iterable[Any] | None = (),
        data: str | Path = "digits",
        recipe: Recipe | RecipeChoice | str | None = None,
        seeds: int | Iterable[int] | None = None,
        *,
        task: str | None = None,
        start: str | Path | None = None,
        positions: Resampling = "bicubic",
        pretrain: str | None = None,
        pretrain_data: str | Path | None = None,
        match: Literal["parameters"] | None = None,
        budget: str | int | Budget | None = None,
        settings: StudySettings = USUAL_SETTINGS,
        images: ImageOptions = USUAL_IMAGES,
        **options: Any,
    ):
        names = {field.name for field in fields(StudySettings)}
        chosen = {name: options.pop(name) for name in names.intersection(options)}
        settings = override(settings, chosen)
        images = override(images, options, "a study or its images", names)
        arms = tuple(arms) if isinstance(arms, Iterable) and not isinstance(arms, str | Mapping) else arms
        seeds = None if seeds is None else make_seeds(seeds)
        if not isinstance(recipe, Recipe | RecipeChoice | str | None):
            raise UserError(f"recipe is a Recipe, as vm.recipes.default() gives it, or a name, not {recipe!r:.60}.")
        self._arguments: dict[str, Any] = {
            "base": base, "arms": arms, "data": data, "recipe": recipe, "seeds": seeds, "task": task, "start": start,
            "positions": positions, "pretrain": pretrain, "pretrain_data": pretrain_data, "match": match,
            "budget": budget, "settings": settings, "images": images,
        }  # fmt: skip
        self.settings: Settings
        self._notes = tuple[str, ...]()
        self._several: TwoStages | OverData | None = None
        if studies := self._split_by_data():
            from vitmods.study.stages import OverData

            of_first = next(iter(studies.values()))
            self.settings, self._notes, self._several = of_first.settings, of_first._notes, OverData(studies)
            for study in studies.values():
                study._notes = ()  # they are said once
            return
        self._notes = self._fill_in()
        self._check_stages()
        given, settings = self._arguments, self._arguments["settings"]
        trained = {} if start is None else arms_in(str(start))
        start = trained[BASE].start if trained else start
        of_start = [] if start is None else seeds_of(str(start))
        chosen_seeds = seeds or make_seeds(of_start or settings.usual_seeds)
        sweep = settings.swept
        self._common: dict[str, Any] = {
            "data": data, "recipe": recipe, "task": given["task"], "start": start, "positions": positions,
            "paper": self._paper, "swept": sweep.get("base", ()),
        }  # fmt: skip
        chosen_arms, known = self._make_arms(trained)  # before the images, which may be many, are listed
        first = None if given["pretrain"] is None else self._first_stage(chosen_arms)
        model: Any = given["base"]
        fixed, self._defaults, self._recipe_note = fixed_settings(model, images=images, defaults=known, **self._common)
        if "base" in sweep:
            bases = [one_spelling(network(name, self._paper)) for name in sweep["base"]]
            settings = replace(settings, sweep=sweep | {"base": bases})
        unset = open_settings(model, recipe, images, start)
        if seeds is None and not of_start and chosen_arms:  # base alone has all of its seeds
            unset |= {"seeds"}
        if not chosen_arms and (settings.sweep or settings.tune or settings.design):
            raise UserError("Base alone is trained in one way: leave out several bases, --sweep, --tune and --design.")
        self.settings = Settings(fixed, chosen_arms, chosen_seeds, **vars(settings), open=unset)
        check_settings(self.settings)
        self._several = self._two_stages(first) if first else None

    def _make_arms(self, trained: Mapping[str, Arm]) -> tuple[tuple[Arm, ...], Defaults | None]:
        """Make the arms, where `trained` are those of a folder of checkpoints. Also returns what fits the images, as
        far as the promising arms were chosen by it. UserError for arms, or a match, that no study can have."""
        arms, match, known = self._arguments["arms"], self._arguments["match"], None
        if isinstance(arms, tuple) and PROMISING in arms and len(arms) > 1:
            raise UserError(f"{PROMISING} chooses the arms of a study: give it alone, or name all arms.")
        if is_promising(arms):
            made, known = self._promising()
        else:
            made = () if arms is None else make_arms(use_trained_arms(arms, trained) if trained else arms)
        if match not in (None, "parameters"):
            raise UserError(f"match is parameters or None, not {match!r}.")
        return (made if match is None else make_arms(with_matched_ranks(made))), known

    def _promising(self) -> tuple[tuple[Arm, ...], Defaults]:
        """Choose the arms that are promising for base and the images, and note why. UserError where none suits base."""
        from vitmods.study.candidates import candidates_for

        if self._common["start"] is not None:
            raise UserError(
                "The promising changes are those of new models: name the arms to compare in trained weights (--arms)."
            )
        given = self._arguments
        fixed, known, _ = fixed_settings(given["base"], images=given["images"], **self._common)
        chosen, _ = candidates_for(make_cell(fixed, Arm(BASE)), known.images)
        if not chosen:
            raise UserError("None of the promising changes suits this base: name what to compare (--arms).")
        reasons = "; ".join(f"{one.change}, {one.why}" for one in chosen)
        self._notes += (f"note: Arms that our studies found promising for new models like this one: {reasons}.",)
        return make_arms([one.change for one in chosen]), known

    def _but(self, **changes: Any) -> Study:
        """Return the study of other arguments."""
        return Study(**{**self._arguments, **changes})

    def _split_by_data(self) -> dict[str, Study]:
        """Make the study of each data set of a sweep over data; empty for others."""
        settings = self._arguments["settings"]
        sweep = settings.swept
        if "data" not in sweep:
            return {}
        alone = replace(settings, sweep={name: values for name, values in sweep.items() if name != "data"})
        arms, studies = self._arguments["arms"], dict[str, Study]()
        for name in sweep["data"]:
            studies[name] = self._but(data=name, settings=alone, arms=arms)
            if is_promising(arms):  # those of the first data set, on all of them
                arms = studies[name].settings.factors
        of_each = [study.settings for study in studies.values()]
        is_plain = all(each.is_plain and each.arms and not each.until_decided for each in of_each)
        if not is_plain or any(study._several for study in studies.values()):
            raise UserError(
                "--sweep data=... runs a study without another sweep and without --pretrain on each data set, of arms "
                "with a fixed number of seeds, without --design and --folds: give one --base, and instead of "
                "paper:NAME of a table with a sweep its arms."
            )
        return studies

    def _fill_in(self) -> tuple[str, ...]:
        """Use the bases, the sweep, the task and the metric of a published table where they are not given, and list
        several bases as a sweep. Returns a line that says what is used.

        Raises UserError where a table needs trained weights and none are given, or where an arm that changes the model
        would start from base's, which were trained without the change.
        """
        given, line_up, settings = self._arguments, table_of(self._arguments["arms"]), self._arguments["settings"]
        self._paper, own = paper_of(given["recipe"]), paper_of(given["recipe"]).partition("(")[0]
        if line_up is not None and not (own and evidence(own).paper and own != line_up.recipe.partition("(")[0]):
            self._paper = line_up.network  # also with a recipe for small budgets
        base, task, start = given["base"], given["task"], given["start"]
        sweep, using = settings.swept, list[str]()
        if start is not None:
            refuse_two_meanings(given["arms"])
        if line_up is not None:
            if given["pretrain"] is not None and not line_up.pretrain:
                raise UserError(f"--pretrain does not support {line_up.name}: name the arms.")
            if line_up.pretrain and start is None and task is None and given["pretrain"] is None:
                given["pretrain"] = line_up.pretrain
            check_weights_for(line_up, start)
            if task is None and line_up.task != CLASSIFICATION:
                task = line_up.task
                using.append(f"--task {task}")
            if line_up.bases and not (base or start or "base" in sweep):
                patch = defaults_for(str(given["data"]), given["images"]).base.rpartition("/")[2]
                base = tuple(line_up.scaled(int(patch) if patch.isdigit() else 16, self._paper))
                using.append(f"--base {' '.join(base)}")
            if not sweep:
                sweep = {name: list(values) for name, values in line_up.sweep.items()}
                using += [f"--sweep {name}={','.join(map(str, values))}" for name, values in sweep.items()]
            if settings.metric is None and line_up.metric:
                settings = replace(settings, metric=line_up.metric)
                using.append(f"--metric {line_up.metric}")
        if isinstance(base, Sequence) and not isinstance(base, str):
            bases, base = tuple(base), base[0] if base else None
            if len(bases) > 1 and "base" in sweep:
                raise UserError("--base and --sweep base=... both list bases: leave one of the two out.")
            if len(bases) > 1 and not all(isinstance(name, str) for name in bases):
                raise UserError("Several bases are names, such as S/16: any other model needs a study of its own.")
            sweep = {"base": list(bases), **sweep} if len(bases) > 1 else sweep
        given |= {"base": base, "task": task or CLASSIFICATION, "settings": replace(settings, sweep=sweep)}
        return () if line_up is None else (f"{line_up.title}.{' Using ' if using else ''}{' '.join(using)}",)

    def _check_stages(self) -> None:
        """Raise UserError for settings that a study that is pre-trained cannot have, and for images of a stage that
        there is not."""
        given, settings = self._arguments, self._arguments["settings"]
        if given["pretrain"] is None:
            if given["pretrain_data"] is not None:
                raise UserError("--pretrain-data has the images of --pretrain: name a task with --pretrain.")
            return
        values = {
            "--from": given["start"], "--budget": given["budget"], "--until-decided": settings.until_decided,
            "--design": settings.design, "several bases": "base" in settings.swept,
            "--sweep": settings.sweep, "--tune": settings.tune,
        }  # fmt: skip
        if refused := [name for name, value in values.items() if value]:
            raise UserError(_one_by_one(refused[0]))

    def _first_stage(self, arms: Sequence[Arm]) -> Study:
        """Return the study that trains base and these arms without labels; base of the second one is then its ViT."""
        from vitmods.study.stages import read_pretraining

        if of_parts := [arm.name for arm in arms if arm.recipe]:
            raise UserError(_one_by_one(f"the arm {of_parts[0]}, which sets what is trained"))
        given, settings, images = self._arguments, self._arguments["settings"], self._arguments["images"]
        task, recipe, metric = read_pretraining(given["pretrain"])
        data, folds, unlabeled = given["data"], settings.folds, replace(images, limit_train=None)
        if given["pretrain_data"] is not None:  # other images, whose splits are others too
            shape = {name: getattr(images, name) for name in ("img_size", "in_chans", "unreadable")}
            data, folds, unlabeled = given["pretrain_data"], None, ImageOptions(**shape)
        of_first = replace(settings, metric=metric, margin=None, folds=folds)
        chosen: dict[str, Any] = {"data": data, "task": task, "recipe": recipe, "images": unlabeled}
        if isinstance(given["base"], str):
            chosen["base"] = network(given["base"], self._paper)
        study = self._but(pretrain=None, pretrain_data=None, arms=arms, settings=of_first, **chosen)
        if isinstance(given["base"], str | None):
            name = study.settings.fixed["base"]
            given["base"] = name if is_foreign(name) or "?" in name else f"{name}?"
        return study

    def _two_stages(self, first: Study) -> TwoStages:
        """Return this study after that one. Raises UserError for arms that the folder of the first cannot name."""
        from vitmods.study.prepare import user_functions
        from vitmods.study.stages import TwoStages

        if local := [function.name for function in user_functions(self.settings) if function.module is None]:
            raise UserError(
                f"--pretrain does not support {local[0]}, a function that this process alone knows: define it in a "
                "module that can be imported, since the second stage reads it from the folder of the first."
            )
        return TwoStages(first, self.settings, self._with_weights_of, self._as_long)

    def _as_long(self) -> Study:
        """Return the second stage with new weights, and as long a training as from trained ones."""
        choice = self._arguments["recipe"] or RecipeChoice()
        if isinstance(choice, RecipeChoice) and choice.name is None:
            batch = {"batch_size": self.settings.recipe.batch_size}
            choice = RecipeChoice("finetune", {**batch, **choice.overrides})
        return self._but(pretrain=None, pretrain_data=None, arms=self.settings.arms, recipe=choice)

    def _with_weights_of(self, folder: Path) -> Study:
        """Return the second stage, of all arms of the first one's folder."""
        return self._but(pretrain=None, pretrain_data=None, base=None, arms=(), start=folder)

    @property
    def training_images(self) -> int:
        """About how many images are trained on; 0: nobody knows before they are read."""
        return self._defaults.images

    @property
    def data_sets(self) -> tuple[str, ...]:
        """The data sets of a sweep over data, each of which has a study; else empty."""
        return tuple(getattr(self._several, "studies", ()))

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

        One that is pre-trained trains without labels in `out/pretraining` first, and returns that answer while it is
        not complete.

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

        if self._several and not self.data_sets:
            answer: Any = self._several.run(Path(out), self._of_several(budget, options, overrides), command)
            return answer
        return run_study(*self._request(out, budget, options, overrides), command)

    def run_over_data(
        self, out: str | Path, *, command: str | None = None, options: StudyOptions = USUAL_OPTIONS, **overrides: Any
    ) -> AnswerOverData:
        """Run the study of each data set of a sweep over data, in a folder of its own in `out`, and average over them.

        All are checked before the first one trains. Arguments and errors are those of `run`.
        """
        if not (self._several and self.data_sets):
            raise UserError('One data set is not averaged over: give sweep={"data": [...]}, or call run.')
        over: Any = self._several.run(Path(out), self._of_several(None, options, overrides), command)
        return over

    def confirm(
        self,
        out: str | Path,
        seeds: int | None = Design.usual_seeds,
        *,
        arm: str | Arm | None = None,
        longer: bool = False,
        **options: Any,
    ) -> Answer:
        """Train the best combination that a factorial study in `out` predicts, another arm, or base alone, against base
        on fresh seeds, and on test if that study was about val.

        It is another study, in a folder below `out`; the answer of a factorial one has its effect as the question
        `confirmed`.

        Args:
            out: the study's folder.
            seeds: how many; None: as many as fit the budget.
            arm: the name of an arm, of a change of a factorial study, or `base`, or the arm itself; None: the
                combination.
            longer: whether trainings are as long as fits the budget, if their length was not given.
            options: those of `run`.

        Raises:
            UserError: the study does not have such an arm; without `arm`, it is not finished or not factorial, or no
                change is predicted to help.
        """
        from vitmods.study.answer import Answer
        from vitmods.study.store import StudyFolder

        if arm is None:
            self.settings.refuse("confirm")
        answer = Answer.load(out)
        settings = self.settings.continuing(StudyFolder(out).known_facts().settings)
        if arm is None and not answer.complete:
            raise UserError(f"{out} is not finished: run it first, so that the best combination is known.")
        if arm is None and not answer.headline.together:
            raise UserError("No change is predicted to help: a combination to confirm does not exist.")
        by_name = {one.name: one for one in (*settings.every_arm, *settings.factors)}
        if isinstance(arm, str) and arm not in by_name:
            raise UserError(f"The study does not have an arm {arm!r}. {nearest(arm, by_name)}")
        chosen = by_name[arm] if isinstance(arm, str) else arm or settings.design.combination(answer.headline.together)
        arms = () if chosen.name == BASE else (chosen,)
        if not arms and (settings.sweep or settings.tune):
            raise UserError("Base alone is trained in one way: confirm an arm of a study with --sweep or --tune.")
        opened = frozenset() if seeds else frozenset({"seeds"})  # all else is as in the study that is confirmed
        if longer:
            lengths, recipe = {"epochs", "steps", *WARMUPS}, self.settings.recipe.settings()
            opened |= self.settings.open & lengths
            settings = settings.with_recipe(**{name: recipe[name] for name in lengths if "epochs" in opened})
        fixed = {**settings.fixed, "answer_on": "test"} if settings.fixed.get("answer_on") else settings.fixed
        study = copy(self)
        study._notes, study._recipe_note = (), ""  # said before
        study.settings = replace(
            settings,
            fixed=fixed,
            arms=arms,
            until_decided=False,
            design=DESIGNS["arms"].plan(settings),  # or base alone, as follows from the arms
            runs=None,
            spare=0,
            seeds=make_seeds(range(FRESH, FRESH + (seeds or Design.usual_seeds))),
            open=opened,
        )
        return study.run(StudyFolder(out).confirmation(chosen.name).path, **options)

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
            UserError: the study is another one; or it is not finished, and "best" or a tuned arm is asked for.
        """
        from vitmods.study.retrain import retrain_study

        request, path, options = self._request(out, None, options, overrides)
        return retrain_study(request.settings, path, arm, seed, options)

    def dry_run(
        self,
        out: str | Path | None = None,
        *,
        budget: str | int | Budget | None = None,
        command: str | None = None,
        options: StudyOptions = USUAL_OPTIONS,
        **overrides: Any,
    ) -> Estimate | Estimates:
        """Estimate trials, sizes, time (by a few timed steps), disk and detectable effects of `run`; writes nothing.

        Trials that are finished in `out` do not count; the variance follows from them, or from studies next to `out`.
        Arguments and errors are those of `run`; with a budget it estimates the study that `run` would plan for it.
        """
        from vitmods.study.run import dry_run

        if self._several:
            options = self._of_several(budget, options, overrides)
            return self._several.estimate(Path(out) if out else None, options, command)
        return dry_run(*self._request(out or os.devnull, budget, options, overrides), command)

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

        return run_pilot(*self._request(out, budget, options, overrides), command)

    def _request(
        self, out: str | Path, budget: str | int | Budget | None, options: StudyOptions, overrides: Mapping[str, Any]
    ) -> tuple[Request, Path, StudyOptions]:
        """Return what `vitmods.study.run` reads, of two stages the second one.

        Raises UserError for a study over data sets, and before the first of two stages is trained.
        """
        from vitmods.study.budget import make_budget
        from vitmods.study.prepare import say
        from vitmods.study.run import Request

        options = override(options, overrides)
        if self.data_sets:
            raise UserError(
                "This is for a study of one data set, and --sweep data=... has several: name one of them (--data). In "
                "Python, run_over_data runs the study of each."
            )
        if self._several:
            from vitmods.study.stages import PRETRAINING
            from vitmods.study.store import StudyFolder

            if StudyFolder(folder := Path(out) / PRETRAINING).facts() is None:
                raise UserError(f"{out} is not pre-trained yet: first run the study (without --pilot or --retrain).")
            return self._with_weights_of(folder)._request(out, budget, options, {})
        options.check_here(cell.recipe.precision for cell in self.settings.cells)
        for line in self._notes:
            say(options, line)
        limit = make_budget(self._arguments["budget"] if budget is None else budget)
        request = Request(self.settings, limit, self._recipe_note, self._rungs)
        return request, Path(out), options

    def _of_several(
        self, budget: str | int | Budget | None, options: StudyOptions, overrides: Mapping[str, Any]
    ) -> StudyOptions:
        """Return the options of a run of several tables. Raises UserError for a budget."""
        from vitmods.study.prepare import say

        options = override(options, overrides)
        if (budget, self._arguments["budget"]) != (None, None):
            assert self._several is not None
            raise UserError(f"{self._several.option} does not support --budget, which is of one table: set --seeds.")
        options.check_here(cell.recipe.precision for cell in self.settings.cells)
        for line in self._notes:
            say(options, line)
        return options

    def _rungs(self) -> list[Rung]:
        """List the study with each model and image size that a time budget is tried with."""
        given, start, task = self._arguments, self._common["start"], self._common["task"]
        base, images = given["base"], given["images"]
        count, pixels = self._defaults.images, self._defaults.side
        from vitmods.tasks.base import TASKS

        if self.settings.open.isdisjoint({"base", "img_size"}):
            return [Rung(self.settings, self._recipe_note, count, pixels)]
        rungs: list[tuple[Any, Any]] = [(base, images.img_size)]
        if start is None and isinstance(base, str | None) and TASKS[task].uses_head:
            sides = (images.img_size,) if isinstance(images.img_size, int) else images.img_size
            rungs = list(self._defaults.rungs(base, sides))
        elif start is not None and images.img_size is None:
            rungs += [(base, side) for side in self._smaller_sides()]
        studies = []
        for name, side in rungs:
            resized = replace(images, img_size=side)
            with suppress(UserError):  # the recipe, the task or the model does not suit this size
                fixed, _, note = fixed_settings(name, images=resized, defaults=self._defaults, **self._common)
                studies.append(Rung(replace(self.settings, fixed=fixed), note, count, pixels))
        return studies or [Rung(self.settings, self._recipe_note, count, pixels)]

    def _smaller_sides(self) -> list[int]:
        """List smaller sides of images for a trained ViT, whose positions are resampled: with about half and a fifth of
        the tokens."""
        from vitmods.study.trial import base_config

        rows, columns = self.settings.fixed["img_size"]
        patch = getattr(base_config(self.settings.cells[0], 2), "patch_size", None)
        if patch is None or rows != columns or patch[0] != patch[1]:
            return []
        sides = [patch[0] * round(part * rows / patch[0]) for part in (0.7, 0.45)]
        return [side for side in sides if FEWEST_PATCHES * patch[0] <= side < rows]


def _one_by_one(what: str) -> str:
    return (
        f"--pretrain does not support {what}: run the stages one by one, `vitmods compare --task TASK ... --out "
        "FOLDER` and `vitmods compare --from FOLDER ...`."
    )


def override(options: T, overrides: Mapping[str, Any], what: str = "a run", others: Iterable[str] = ()) -> T:
    """Replace fields of options by name. Raises TypeError, naming the nearest, for other names."""
    names = {field.name for field in fields(options)}
    for name in overrides:
        if name not in names:
            raise TypeError(f"{name!r} is not an option of {what}. {nearest(name, [*names, *others])}")
    return replace(options, **overrides)
