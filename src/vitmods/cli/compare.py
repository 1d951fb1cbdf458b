"""`vitmods compare`: the study."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitmods.cli.options import DataOptions, announce, expected_folder, note, parse, readable_folder
from vitmods.evals.options import Options
from vitmods.finetune.roles import ALL
from vitmods.study.arms import make_arms
from vitmods.study.budget import Budget, make_budget
from vitmods.study.defaults import RecipeChoice
from vitmods.study.executors import StudyOptions
from vitmods.study.executors.processes import start_template_early
from vitmods.study.grid import make_grid
from vitmods.study.plan import Measure, StudySettings, measure_of
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.files import write_json
from vitmods.util.registry import plugin_options
from vitmods.util.shorthand import without_options
from vitmods.util.text import duration, first_of, plural

if TYPE_CHECKING:
    from vitmods.study import Answer, Study
    from vitmods.study.arms import LineUp

FAILED = 1
PRETRAINING = "pretraining"
"""name of the first stage's folder, in the folder of the study"""
USUAL_ARMS = ("dpn", "rms", "placement(attn=post,mlp=post)")
ARMS_OF_TRAINED = ("attention", "head", "train(norms)")
"""of trained weights, which keep them"""
COMMON = (
    "data arms base from task img-size recipe epochs seeds until-decided budget margin metric workers device out "
    "dry-run"
)
COMMON_OF_BASE = "data base from task img-size recipe epochs seeds budget metric workers device out dry-run"
"""options that --help shows"""


@dataclass(frozen=True)
class Compare:
    """Train a base ViT and changed ones on the same seeds; report which change helps, and what it costs.

    Re-running the command resumes the study and changes nothing that is finished; arms and seeds may be added.
    The folder of --out gets results.json, results.csv and report.html. Exit code: 0; 1 if a trial failed, or
    all trials of base diverged; 2 for an error; 130 if stopped.

    examples:
      vitmods compare
      vitmods compare --data path/to/images --arms dpn rms dpn+rms --seeds 5
      vitmods compare --data path/to/images --arms dpn rms --until-decided --budget 2h
      vitmods compare --data path/to/images --arms norms --dry-run     (every kind of norm)
      vitmods compare --data path/to/images --arms paper:dpn-table6 --base Ti/4     (reproduce a published table)
      vitmods compare --base S/16 --img-size 224 --arms "post=placement(attn=post,mlp=post)" --dry-run
      vitmods compare --base timm:pvt_v2_b0 --img-size 64 --arms "replace(rms)" "replace(dtn)"     (any model)
      vitmods compare --from runs/digits-mu3-2-train-base-seed0 --data path/to/images --arms full attention ffn
      vitmods compare --from runs/pretrained --data path/to/images      (a study: each arm from its own weights)
      vitmods compare --pretrain "dino(epochs=200)" --data path/to/images --arms dpn     (both stages)
      vitmods compare --arms dpn --tune lr=1e-4,3e-4,1e-3                   (the same budget for every arm)
      vitmods compare --arms dpn --sweep base=Ti/16,S/16     (an effect for each, and their average)
      vitmods compare --base Ti/16 S/16 --arms dpn --img-size 224     (the same, for several bases)
      vitmods compare --arms dpn rms layerscale --design factorial --confirm     (all changes in every trial)
      vitmods compare --arms dpn --metric ece
      vitmods compare --task multilabel --data path/to/labels.csv --arms dpn rms
      vitmods compare --retrain best     (train the arm to deploy on all images)
      vitmods compare --recipe plain --help-all      (every option, with the defaults of that recipe)
    """

    dataset: DataOptions
    training: RecipeChoice
    options: StudyOptions
    settings: StudySettings
    protocols: Options
    arms: tuple[str, ...] | None = None
    """changes to compare against base, joined by +, or NAME=CHANGES; `vitmods changes` lists them. replace(rms),
    replace(dtn): other norms in any transformer. attention, ffn, head, train(ROLES): what is trained; full: all of it.
    paper:TABLE: the arms of a published table, and its task, bases and sweep unless you set them (`vitmods paper`);
    norms: only the arms of one. None: dpn rms placement(attn=post,mlp=post); with --from all arms of its folder, or
    attention head train(norms)"""
    base: tuple[str, ...] = ()
    """the model without changes, or several: then every arm is compared with each. Ti/16, S/16, B/16, S36/16 (36 deep),
    or a timm name; any other model as timm:NAME, torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION
    (docs/any-model.md); none: what fits the images"""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """trained weights to start from, which also set base: a trial folder, a file or a timm model name. A study folder,
    or a folder of several checkpoints, starts each arm from its own weights"""
    pretrain: str | None = None
    """first train every arm and seed without labels: a task or a recipe with settings, as dino or
    "beit(epochs=50,codes=512)". These trials are the study in pretraining of --out; the arms then start from them"""
    pretrain_data: str | None = None
    """the images of --pretrain; None: those of --data, all that --limit-train leaves out too"""
    confirm: bool = False
    """then train the best combination that a factorial study predicts against base, on 5 fresh seeds"""
    seeds: int | None = None
    """trials per arm; None: 5, or one per fold if there are more folds; 3 in a factorial study; with --budget as many
    as fit"""
    max_seeds: int | None = None
    """most trials per arm, with --until-decided; None: 16, or 8 in a factorial study; with --budget as many as fit, at
    most 32"""
    budget: str | None = None
    """how much this run may take: 2h, 30m, or 40trials; re-running the command resumes. A new study with a time also
    gets model, image size, epochs and seeds that fit, as far as you do not set them (docs/study.md). None: no limit"""
    recipe: str | None = None
    """recipe with the defaults of training: plain, deit, augreg(level=light1), ...; `vitmods recipes` lists them. None:
    what fits the images, or finetune with --from"""
    out: Path | None = None
    """folder of the study, or an address such as s3://bucket/folder (docs/clusters.md); None: runs/DATA-BASE, or
    runs/DATA if base is chosen for a budget"""
    quiet: bool = False
    """print no progress on the error stream"""
    retrain: str | None = None
    """after the study has ended: train this arm, or best, on all images, including the test set, into retrained/ARM;
    best is the cheapest of the arms that help and may be best, or base"""
    dry_run: bool = False
    """train nothing: show arms, trials, sizes, an estimate of time and disk, and the effects that each number of seeds
    can find"""
    pilot: bool = False
    """train base on four seeds, which count later, and show the dry run with the variance now known"""

    def __post_init__(self) -> None:
        """Raise UserError for options that exclude or need each other."""
        if self.max_seeds is not None and not self.settings.until_decided:
            raise UserError("--max-seeds needs --until-decided; --seeds sets a fixed number.")
        if self.seeds is not None and self.settings.until_decided:
            raise UserError("With --until-decided, set --max-seeds, not --seeds.")
        if self.confirm and self.settings.design is None:
            raise UserError("--confirm needs --design factorial.")
        if self.retrain is not None and (self.dry_run or self.pilot or self.budget is not None):
            raise UserError("--retrain trains one arm once, after the study: drop --dry-run, --pilot and --budget.")
        if self.pretrain is None and self.pretrain_data is not None:
            raise UserError("--pretrain-data has the images of --pretrain: name a task with --pretrain.")
        settings = self.settings
        one_by_one: dict[str, Any] = {"from": self.start, "retrain": self.retrain, "pilot": self.pilot}
        one_by_one |= {"budget": self.budget, "confirm": self.confirm, "until-decided": settings.until_decided}
        one_by_one |= {"design": settings.design, "tune": settings.tune, "sweep": settings.sweep}
        one_by_one |= {"several bases": len(self.base) > 1}
        if self.pretrain is not None and (name := next((name for name, value in one_by_one.items() if value), None)):
            raise UserError(
                f"--pretrain does not support {name if ' ' in name else f'--{name}'}: run the stages one by one, "
                "`vitmods compare --task TASK ... --out FOLDER` and `vitmods compare --from FOLDER ...`."
            )


@dataclass(frozen=True)
class Base:
    """Train a model without changes on many seeds; report its spread, learning curve and time.

    Studies of the same images and recipe in folders next to it reuse its trials, so that they train arms alone.

    examples:
      vitmods base --data path/to/images --base Ti/16 --seeds 16
      vitmods compare --data path/to/images --base Ti/16 --arms dpn     (then: base is known from 16 trials)
    """

    dataset: DataOptions
    training: RecipeChoice
    options: StudyOptions
    settings: StudySettings
    base: str | None = None
    """the model: Ti/16, S/16, B/16, or a timm name; any other as timm:NAME, torchvision:NAME, hf:FOLDER,
    python:MODULE:FUNCTION (docs/any-model.md); None: what fits the images"""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """trained weights to start from, which also set base"""
    seeds: int = 16
    """number of trials"""
    budget: str | None = None
    """how much this run may take: 2h, 30m, or 40trials; re-running the command resumes. None: no limit"""
    recipe: str | None = None
    """recipe with the defaults of training; `vitmods recipes` lists them. None: what fits the images, or finetune with
    --from"""
    out: Path | None = None
    """folder of the study, or an address; None: runs/DATA-BASE-base"""
    quiet: bool = False
    """print no progress on the error stream"""
    dry_run: bool = False
    """train nothing: show sizes and an estimate of time and disk"""


def train_base(arguments: Sequence[str]) -> int:
    """Run `vitmods base`; returns the exit code."""
    options = parse(Base, arguments, "base", COMMON_OF_BASE)
    dataset, base = options.dataset, Path(options.start).name if options.start else options.base or ""
    if not options.quiet:
        what = f"Training base{f' ({base})' if base else ''} on {dataset.data}, {plural(options.seeds, 'seed')}"
        announce(what, expected_folder(options.out, dataset.data, base, "base"))
    machine = replace(options.options, progress=not options.quiet)
    with nullcontext() if options.dry_run else start_template_early(machine):
        from vitmods.study import Study

        machine.check_here()
        study = Study(
            options.base, None, dataset.data, options.training, options.seeds, task=dataset.task, start=options.start,
            settings=options.settings, images=dataset,
        )  # fmt: skip
        name = Path(options.start).name if options.start else str(study.settings.fixed["base"])
        out = options.out or readable_folder(dataset.data, name, "base")
        command = shlex.join(["vitmods", "base", *arguments, *plugin_options()])
        if options.dry_run:
            print(study.dry_run(out, budget=options.budget, command=command, options=machine))
            return 0
        reference = study.run_base(out, budget=options.budget, command=command, options=machine)
        print(reference)
        if missing := options.seeds - len(reference.scores) - len(reference.failed):
            print(f"{missing} of {plural(options.seeds, 'seed')} are missing: the same command trains them.")
        for failure in reference.failed:
            print(f"failed: {failure}", file=sys.stderr)
        return FAILED if reference.failed or (reference.scores and reference.mean is None) else 0


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = parse(Compare, arguments, "compare", COMMON)
    budget = make_budget(options.budget)
    sweeps_data = "data" in make_grid(options.settings.sweep, "--sweep").to_dict()
    from vitmods.study.arms import find_line_up

    named_line_ups = ((arm, line_up.name) for arm in options.arms or () if (line_up := find_line_up(arm)))
    tables = [arm for arm, name in named_line_ups if arm.strip() in (name, f"paper:{name}")]  # not `norms`
    if len(tables) > 1:
        raise UserError(f"A study has the bases and settings of one table: give one of {' and '.join(tables)}.")
    line_up = find_line_up(tables[0]) if tables else None
    task_given = any(re.match("--task(=|$)", word) for word in arguments)
    if line_up and line_up.pretrain and not (options.pretrain or options.start or task_given):
        if options.budget:
            raise UserError(f"{line_up.name} has two stages, which --budget does not support: set --seeds.")
        options = replace(options, pretrain=line_up.pretrain)
    if not (options.quiet or sweeps_data or options.pretrain):  # these announce all of their studies
        _announce(options, budget, line_up)
    if options.pretrain is not None and line_up:
        if not line_up.pretrain:
            raise UserError(f"--pretrain does not support {line_up.name}: name the arms.")
        options = fill_in(options, line_up, task_given)
    machine = replace(options.options, progress=not options.quiet)
    trains = not (options.dry_run or options.pilot or options.retrain is not None or budget.seconds)
    with start_template_early(machine) if trains else nullcontext():
        if options.arms and not (options.start or line_up):  # arms of a folder of checkpoints have names of their own
            make_arms(options.arms)
        machine.check_here()
        if options.pretrain is not None:
            return in_two_stages(options, arguments, machine)
        if sweeps_data:
            return over_data(options, arguments, machine, line_up, task_given)
        return compare(options, arguments, budget, machine, line_up, task_given)


def compare(
    options: Compare,
    arguments: Sequence[str],
    budget: Budget,
    machine: StudyOptions,
    line_up: LineUp | None,
    task_given: bool,
) -> int:
    """Run, estimate, pilot or retrain one study, as the options ask. Returns the exit code."""
    study = make_study(fill_in(options, line_up, task_given) if line_up else options)
    names = [line_up.name] if line_up else []
    chooses = budget.seconds is not None and not (options.base or options.start)  # base is not known yet
    if (options.base or not line_up) and not chooses:
        bases = options.base or (str(study.settings.fixed["base"]),)
        names.append(Path(options.start).name if options.start else "-".join(bases))
    out = options.out or readable_folder(options.dataset.data, *names)
    if options.retrain is not None:
        from vitmods.study import Answer

        retrained = study.retrain(out, options.retrain, options=machine)
        print(f"{retrained}\nReport: {named(Answer.load(out).report())}")
        return 0 if retrained.finished else FAILED
    run: dict[str, Any] = {"options": machine, "budget": budget}
    where = ["--out", str(out)] if chooses and not options.out else []  # commands that follow may lack the budget
    run["command"] = shlex.join(["vitmods", "compare", *arguments, *where, *plugin_options()])
    if options.dry_run:
        if options.out:  # without it any folder may do: nothing is written
            from vitmods.study.store import StudyFolder

            StudyFolder(options.out).check_place(options.dataset.data)
        print(study.dry_run(out, **run))
        return 0
    if options.pilot:
        print(study.pilot(out, **run))
        return 0
    result = study.run(out, **run)
    if not (options.confirm and result.complete and result.headline.together):
        return _show(result)
    confirmed = study.confirm(out, **run)
    confirmed.report()
    return max(_show(type(result).load(out)), FAILED if confirmed.failed else 0)


def _announce(options: Compare, budget: Budget, line_up: LineUp | None) -> None:
    """Print what is compared, before torch is imported and the images are listed."""
    settings, data, start = options.settings, options.dataset.data, options.start
    arms = options.arms or (USUAL_ARMS if start is None else ("the usual arms",))
    base = Path(start).name if start else "-".join(options.base)
    count = options.max_seeds if settings.until_decided else options.seeds
    seeds = f"{'at most ' * settings.until_decided}{plural(count or settings.usual_seeds, 'seed')} each"
    if budget.seconds is not None and count is None:
        seeds = "as many seeds as the budget allows"
    bases = start or ", ".join(options.base)
    what = f"Comparing {first_of(arms, 6)} with base{f' ({bases})' if bases else ''} on {data}, {seeds}"
    if options.retrain is not None:
        what = f"Training arm {options.retrain} of the study on all images of {data}"
    chooses = budget.seconds is not None and not base
    names = [line_up.name] if line_up else []
    names += [base] if (options.base or not line_up) and not chooses else []
    folder = expected_folder(options.out, data, *names)
    if options.dry_run:
        announce(what, folder, "Nothing is trained: a few steps of each arm are timed.")
    elif options.pilot:
        announce(what, folder, "Now only base is trained, on 4 seeds at most.")
    elif options.budget:
        may_be_late = budget.seconds is not None and count is None and not settings.until_decided
        announce(what, folder, f"This run takes {'about' if may_be_late else 'at most'} {options.budget}.")
    else:
        announce(what, folder)


def in_two_stages(options: Compare, arguments: Sequence[str], machine: StudyOptions) -> int:
    """Run the study without labels in the folder pretraining of the study's, then the study from its weights. Returns
    the exit code."""
    from vitmods.study.prepare import open_study
    from vitmods.study.store import StudyFolder
    from vitmods.study.trial import already_reported
    from vitmods.util.address import address_of, place

    assert options.pretrain is not None
    if options.out is not None and address_of(place(options.out)):
        raise UserError(f"--pretrain does not support addresses such as {options.out}: choose a folder on this disk.")
    if trained := [arm.name for arm in make_arms(options.arms or USUAL_ARMS) if arm.recipe]:
        raise UserError(
            f"--pretrain does not support the arm {trained[0]}, which sets what is trained: run the stages one by one, "
            "`vitmods compare --task TASK ... --out FOLDER` and "
            f"`vitmods compare --from FOLDER --arms {trained[0]} ...`."
        )
    images, base = options.dataset, "".join(options.base)
    if not options.quiet:
        what = f"Training {first_of(options.arms or USUAL_ARMS, 6)} and base by {options.pretrain}"
        where = expected_folder(options.out, images.data, options.pretrain.partition("(")[0], base)
        announce(f"{what} on {options.pretrain_data or images.data}, then comparing them on {images.data}", where)
    task, recipe, metric = read_pretraining(options.pretrain)
    unlabeled, folds = replace(images, limit_train=None, task=task), options.settings.folds
    of_second = {"data", "task", "limit_train", "recipe", "metric", "margin", "keep_weights", *vars(Options())}
    of_second |= {f"{no}{name}" for name in options.training.overrides for no in ("", "no_")}
    if options.pretrain_data is not None:  # other images, whose splits are others too
        shape = {name: getattr(images, name) for name in ("img_size", "in_chans", "unreadable")}
        unlabeled, folds = DataOptions(data=options.pretrain_data, task=task, **shape), None
        of_second |= {"folds", *vars(images)} - set(shape)
    settings = replace(options.settings, metric=metric, margin=None, folds=folds)
    of_first: dict[str, Any] = {"dataset": unlabeled, "training": recipe, "settings": settings, "protocols": Options()}
    first = make_study(replace(options, pretrain=None, pretrain_data=None, **of_first))
    out = options.out or readable_folder(images.data, task, str(first.settings.fixed["base"]))
    folder = out / PRETRAINING
    both = list(without_options(arguments, ("--pretrain", "--pretrain-data", "--out")))
    words = ["--task", task, "--data", unlabeled.data, "--out", str(folder), *_words(recipe, metric)]
    kept = without_options(both, [f"--{name.replace('_', '-')}" for name in of_second])
    command = shlex.join(["vitmods", "compare", *words, *kept, *plugin_options()])
    keeping = replace(machine, keep_weights="all")  # the second stage starts from them
    run_first: dict[str, Any] = {"options": keeping, "command": command}
    words = ["--from", str(folder), "--out", str(out), *without_options(both, ("--arms", "--base"))]
    command = shlex.join(["vitmods", "compare", *words, *plugin_options()])
    run: dict[str, Any] = {"options": machine, "command": command}
    options = replace(options, pretrain=None, pretrain_data=None)
    start = replace(options, base=(), arms=None, start=str(folder))
    second = StudyFolder(out)
    second.check_place(images.data)
    from_scratch = replace(options, base=(str(first.settings.fixed["base"]),))
    usual = make_study(from_scratch).settings
    if not second.facts():  # what does not suit the images is refused before the first stage trains
        with already_reported():
            open_study(StudyFolder(os.devnull), usual, machine)
    if options.dry_run:
        estimate = first.dry_run(folder, **run_first)
        if estimate.total_s:  # the same models with new weights: a step takes as long
            start = from_scratch
            if options.training.name is None:
                batches = {"batch_size": usual.recipe.batch_size, **options.training.overrides}
                start = replace(start, training=RecipeChoice("finetune", batches))
        is_new = estimate.total_s and second.facts()  # it started from trained weights: another study
        after = make_study(start).dry_run(None if is_new else out, **run)
        print(f"Pre-training ({task}):\n{estimate}\n\nThen:\n{after}\n")
        print(f"Both stages: about {duration(estimate.total_s + after.total_s)}.")
        return 0
    before = first.run(folder, **run_first)
    if not before.complete:
        return _show(before)
    report = named(before.report())
    if lost := [trial for trial in before.trials if trial.status != "finished"]:
        names = {trial.arm for trial in lost}
        arms = options.arms or USUAL_ARMS
        others = [text for text in arms if names.isdisjoint(arm.name for arm in make_arms([text]))]
        remedy = "Choose other settings in --pretrain and another --out"
        if others and before.base.name not in names:
            words = ["vitmods", "compare", *without_options(arguments, ("--arms",)), *plugin_options()]
            remedy += f", or leave these arms out: `{shlex.join([*words, '--arms', *others])}`"
        trials = "; ".join(f"{trial} ({trial.status})" for trial in lost)
        raise UserError(
            f"These trials of the first stage have no weights to start from: {trials}. {remedy}. Report: {report}"
        )
    if not options.quiet:
        note(f"The first stage is complete: {report}")
    return _show(make_study(start).run(out, **run))


def read_pretraining(text: str) -> tuple[str, RecipeChoice, str | None]:
    """The task, the recipe and the metric of --pretrain. Raises UserError for other names and settings."""
    from vitmods.recipes import RECIPES
    from vitmods.recipes.recipe import fields_by_name
    from vitmods.recipes.registry import evidence
    from vitmods.tasks.base import TASKS, WITHOUT_LABELS
    from vitmods.util.shorthand import read_settings, split_form

    name, inside = split_form(text) or (text, "")
    task = name if name in TASKS else evidence(name).task if name in RECIPES else None
    tasks = [other for other in TASKS if TASKS[other].target in WITHOUT_LABELS]
    if task is None or task not in tasks:
        raise UserError(
            f"--pretrain is a task without labels ({', '.join(tasks)}) or one of its recipes, not '{name}'."
        )
    chosen = read_settings(name, "recipe", inside, dict.fromkeys((*fields_by_name(), "metric"), str))
    metric = chosen.pop("metric", None)
    for field, value in chosen.items():
        text = "none" if value == "None" else value.strip("()").replace(",", ":")  # (0.1,0.4)
        chosen |= make_grid({field: [text]}, "--pretrain").points[0].values
    return task, RecipeChoice(None if name in TASKS else name, chosen), metric


def _words(recipe: RecipeChoice, metric: str | None) -> list[str]:
    """The options of a recipe and a metric."""
    from vitmods.recipes import Recipe
    from vitmods.recipes.registry import parse_recipe

    usual = parse_recipe(recipe.name or "default", like=Recipe()).settings()
    words = [*(["--recipe", recipe.name] if recipe.name else []), *(["--metric", metric] if metric else [])]
    for name, value in recipe.overrides.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):  # the shell has the option that changes it alone
            words += [f"--{option}" if value else f"--no-{option}"] if value != usual[name] else []
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def over_data(
    options: Compare, arguments: Sequence[str], machine: StudyOptions, line_up: LineUp | None, task_given: bool
) -> int:
    """Run a study for each data set, in one folder each, and answer over all of them; returns the exit code."""
    from vitmods.stats import tables
    from vitmods.study.prepare import open_study
    from vitmods.study.questions import over_studies
    from vitmods.study.store import StudyFolder, slug

    sweep = make_grid(options.settings.sweep, "--sweep").to_dict()
    excluded = {
        "--data": any(re.match("--data(=|$)", word) for word in arguments),
        "--budget": options.budget is not None,
    }
    excluded |= {"--retrain": options.retrain is not None, "--pilot": options.pilot, "another sweep": len(sweep) > 1}
    if refused := [name for name, is_given in excluded.items() if is_given]:
        raise UserError(f"--sweep data=... excludes {refused[0]}: leave it out, or compare on each data set by itself.")
    folder = [line_up.name] if line_up else [Path(name.partition("?")[0]).name for name in sweep["data"]]
    out = options.out or readable_folder("-".join(folder))
    if not options.quiet:
        arms = first_of(options.arms or USUAL_ARMS, 6)
        announce(f"Comparing {arms} with base on {first_of(sweep['data'], 6)}, a study for each", str(out))
    alone = replace(options.settings, sweep=())
    studies: dict[str, Study] = {}
    for name in sweep["data"]:
        of_set = replace(options, settings=alone, dataset=replace(options.dataset, data=name))
        if line_up:  # what it compares, and what it sets, is printed once
            of_set = fill_in(replace(of_set, quiet=options.quiet or bool(studies)), line_up, task_given)
        if of_set.settings.sweep or len(of_set.base) > 1:
            raise UserError(
                "--sweep data=... runs a study without another sweep on each data set: give one --base, and instead of "
                "paper:NAME of a table with a sweep its arms."
            )
        studies[name] = make_study(of_set)
    for name, study in studies.items() if not options.dry_run else ():  # check all before the first one runs
        with warnings.catch_warnings():  # which come again
            warnings.simplefilter("ignore")
            open_study(StudyFolder(out / slug(name)), study.settings, replace(machine, progress=False))
    command, results = shlex.join(["vitmods", "compare", *arguments, *plugin_options()]), []
    for name, study in studies.items():
        run: dict[str, Any] = {"options": machine, "command": command}
        if options.dry_run:
            print(f"{name}:\n{study.dry_run(out / slug(name), **run)}\n")
        else:
            if not options.quiet:
                print(f"{name}:", file=sys.stderr, flush=True)
            results.append(study.run(out / slug(name), **run))
    if options.dry_run:
        return 0
    over = over_studies(result.path for result in results)
    write_json(out / "over_data.json", over.to_dict())
    for arm, effects in over.each.items():
        print(f"{arm} on each data set:\n{tables.text(list(effects.values()))}\n")
    print(f"On average over {len(results)} data sets:\n{over}\n")
    for result in results:
        print(f"Report: {named(result.report())}")
    for failure in (failure for result in results for failure in result.failed):
        print(f"failed: {failure}", file=sys.stderr)
    return FAILED if any(result.failed or result.has_diverged for result in results) else 0


def fill_in(options: Compare, line_up: LineUp, task_given: bool) -> Compare:
    """Use the bases, the sweep, the task and the metric of a line-up where the command line does not set them.

    Raises UserError where a line-up needs trained weights and none are given, or where an arm that changes the model
    would start from base's, which were trained without the change.
    """
    from vitmods.study.arms import arms_from_text
    from vitmods.study.checkpoints import arm_names
    from vitmods.study.defaults import defaults_for

    if line_up.start and options.start is None:
        raise UserError(f"{line_up.name} starts from trained weights: add --from, {line_up.start}.")
    if line_up.start and options.start:
        changed = [arm.name for text in line_up.arms for arm in arms_from_text(text) if arm.changes]
        if missing := " ".join(name for name in changed if name not in arm_names(options.start)):
            raise UserError(
                f"{options.start} lacks weights of {missing}, and {line_up.name} compares models trained with and "
                "without the change: give --from the folder of a study with both. What the change does to trained "
                f"weights of base is another question: `vitmods compare --from {options.start} --arms {missing}`."
            )
    task = options.dataset.task if task_given else line_up.task
    using = [f"--task {task}"] if task != options.dataset.task else []
    bases, sweep = options.base, make_grid(options.settings.sweep, "--sweep").to_dict()
    if line_up.bases and not (bases or options.start or "base" in sweep):
        patch = defaults_for(options.dataset.data).base.rpartition("/")[2]
        bases = tuple(line_up.scaled(int(patch) if patch.isdigit() else 16))
        using.append(f"--base {' '.join(bases)}")
    if not sweep:
        sweep = {name: list(values) for name, values in line_up.sweep.items()}
        using += [f"--sweep {name}={','.join(map(str, values))}" for name, values in sweep.items()]
    metric = options.settings.metric
    if metric is None and line_up.metric:
        metric = line_up.metric
        using.append(f"--metric {metric}")
    if not options.quiet:
        note(f"{line_up.title}.{' Using ' if using else ''}{' '.join(using)}")
    settings = replace(options.settings, sweep=sweep, metric=metric)
    return replace(options, dataset=replace(options.dataset, task=task), base=bases, settings=settings)


def make_study(options: Compare) -> Study:
    """Make the study of these options; base, which is part of every study, need not be an arm."""
    from vitmods.study import Study
    from vitmods.study.arms import BASE, split_training
    from vitmods.study.checkpoints import arm_names
    from vitmods.tasks.base import TASKS

    texts, train = options.arms, options.training.overrides.get("train", ALL)
    if texts is None:
        texts = arm_names(options.start) if options.start else USUAL_ARMS
        parts = (arm for arm in ARMS_OF_TRAINED if split_training(arm)[1]["train"] != train)
        texts = texts or (USUAL_ARMS if "train" in TASKS[options.dataset.task].unread else tuple(parts))
    names_of_base = {BASE, "full"} if train == ALL else {BASE}
    for arm in sorted(names_of_base.intersection(map(str.strip, texts))):
        subject = BASE if arm == BASE else f"{arm}, which is base here,"
        note(f"{subject} is always part of a study and need not be given as an arm.")
    settings = options.settings
    if len(options.base) > 1:
        sweep = make_grid(settings.sweep, "--sweep").to_dict()
        if "base" in sweep:
            raise UserError("--base and --sweep base=... both list bases: leave one of the two out.")
        settings = replace(settings, sweep={"base": options.base, **sweep})
    metric = settings.metric if isinstance(settings.metric, Measure) else measure_of(options.dataset.task)
    return Study(
        options.base[0] if options.base else None,
        [arm for arm in texts if arm.strip() not in names_of_base],
        options.dataset.data,
        options.training,
        seeds=options.max_seeds if settings.until_decided else options.seeds,
        task=options.dataset.task,
        start=options.start,
        settings=replace(settings, metric=Measure(metric.name, options.protocols)),
        images=options.dataset,
    )


def _show(result: Answer) -> int:
    from vitmods.report import print_answer

    report = result.report()
    print_answer(result)
    print(f"Report: {named(report)}\nResults: {named(result.path / 'results.csv')}, results.json")
    if result.complete:
        return FAILED if result.has_diverged else 0
    for failure in result.failed:
        print(f"failed: {failure}", file=sys.stderr)
    print("The study is not complete; the same command runs what is missing.", file=sys.stderr)
    return FAILED if result.failed else 0  # a budget that ends is no failure
