"""`vitmods compare`: the study."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from vitmods.cli.options import DataOptions, announce, expected_folder, note, parse, readable_folder, with_key
from vitmods.evals.options import Options
from vitmods.finetune.roles import ALL
from vitmods.study.arms import PROMISING, make_arms, table_of
from vitmods.study.budget import Budget, make_budget
from vitmods.study.defaults import RecipeChoice
from vitmods.study.executors import StudyOptions
from vitmods.study.executors.processes import start_template_early
from vitmods.study.settings import Measure, StudySettings, measure_of
from vitmods.util.address import named
from vitmods.util.errors import UserError
from vitmods.util.registry import plugin_options
from vitmods.util.text import first_of, plural

if TYPE_CHECKING:
    from vitmods.study import Study

FAILED = 1  # exit code
ARMS_OF_TRAINED = ("attention", "head", "train(norms)")  # of trained weights, which keep them
COMMON = (
    "data arms base from task img-size recipe epochs seeds until-decided budget margin metric workers device out "
    "dry-run"
)  # options that --help shows


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

    alone: ClassVar[bool] = False  # whether base is trained without arms

    dataset: DataOptions
    training: RecipeChoice
    options: StudyOptions
    settings: StudySettings
    protocols: Options
    arms: tuple[str, ...] | None = None
    """changes to compare against base, joined by +, or NAME=CHANGES; `vitmods changes` lists them. replace(rms),
    replace(dtn): other norms in any transformer. attention, ffn, head, train(ROLES), biases, last(4),
    lora(rank=8), dora(rank=8): what is trained; full: all; prompts(10): new tokens; adapt: eight of these.
    lr(5e-5): a field of the recipe. paper:TABLE: the arms of a published table, and its task, bases and sweep unless
    you set them (`vitmods paper`); norms: only the arms of one. None: promising, the three changes that our studies
    found most promising for images and a base like these; with --from all arms of its folder, or attention head
    train(norms)"""
    base: tuple[str, ...] = ()
    """the model without changes, or several: then every arm is compared with each. Ti/16, S/16, B/16, S36/16 (36 deep),
    or a timm name; any other model as timm:NAME, torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION
    (docs/any-model.md); none: what fits the images"""
    start: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """trained weights to start from, which also set base: a trial folder, a file or a timm model name. A study folder,
    or a folder of several checkpoints, starts each arm from its own weights"""
    key: str | None = None
    """of several models in the file of --from the one to start from, by its place in it or a part of that: teacher"""
    pretrain: str | None = None
    """first train every arm and seed without labels: a task or a recipe with settings, as dino or
    "beit(epochs=50,codes=512)". These trials are the study in pretraining of --out; the arms then start from them"""
    pretrain_data: str | None = None
    """the images of --pretrain; None: those of --data, all that --limit-train leaves out too"""
    match: Literal["parameters"] | None = None
    """parameters: lora and dora have the rank with which they train as many parameters as attention"""
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
        if self.confirm:
            self.settings.refuse("confirm")
        if self.retrain is not None and (self.dry_run or self.pilot or self.budget is not None):
            raise UserError("--retrain trains one arm once, after the study: drop --dry-run, --pilot and --budget.")


def main(arguments: Sequence[str], kind: type[Compare] = Compare, name: str = "compare", common: str = COMMON) -> int:
    """Run `vitmods compare`, or another command of its options; returns the exit code."""
    options = parse(kind, arguments, name, common)
    options = replace(options, start=with_key(options.start, options.key))
    budget, line_up, data = make_budget(options.budget), table_of(options.arms), options.dataset.data
    task = options.dataset.task if any(re.match("--task(=|$)", word) for word in arguments) else None
    if line_up and line_up.pretrain and not (options.pretrain or options.start or task):
        options = replace(options, pretrain=line_up.pretrain)
    data_sets = options.settings.swept.get("data", [])
    if data_sets and any(re.match("--data(=|$)", word) for word in arguments):
        raise UserError("--sweep data=... lists the data sets: leave --data out.")
    # Names of the folder by default; base is not known yet where a budget chooses it.
    chooses = budget.seconds is not None and not (options.base or options.start)
    base = Path(options.start).name if options.start else "-".join(options.base)
    place, names = data, [line_up.name] if line_up else []
    if data_sets:
        place = "-".join(names or [Path(name.partition("?")[0]).name for name in data_sets])
        names = []
    elif options.pretrain:
        names = [options.pretrain.partition("(")[0], base]
    elif (options.base or not line_up) and (options.alone or not chooses):
        names.append(base)
    names += ["base"] * options.alone
    if not options.quiet:
        _announce(options, budget, data_sets, expected_folder(options.out, place, *names))
    machine = replace(options.options, progress=not options.quiet)
    trains = not (options.dry_run or options.pilot or options.retrain is not None or budget.seconds)
    with start_template_early(machine) if trains else nullcontext():
        # Arms of a folder of checkpoints have names of their own, and promising ones are chosen for the images.
        if options.arms and not (options.start or line_up or PROMISING in options.arms):
            make_arms(options.arms)
        machine.check_here()
        study = make_study(options, task, budget if options.budget else None)
        usual = "" if options.start else str(study.settings.fixed["base"])  # of trained weights without a name: nothing
        out = options.out or readable_folder(place, *(part or usual for part in names))
        where = ["--out", str(out)] if chooses and not options.out else []  # commands that follow may lack the budget
        command = shlex.join(["vitmods", name, *arguments, *where, *plugin_options()])
        return run(study, options, out, {"options": machine, "command": command})


def run(study: Study, options: Compare, out: Path, how: dict[str, Any]) -> int:
    """Run, estimate, pilot or retrain a study, as the options ask. Returns the exit code."""
    from vitmods.study import Answer
    from vitmods.study.store import StudyFolder

    if options.retrain is not None:
        retrained = study.retrain(out, options.retrain, options=how["options"])
        print(f"{retrained}\nReport: {named(Answer.load(out).report())}")
        return 0 if retrained.finished else FAILED
    if options.dry_run:
        if options.out and not study.data_sets:  # without it any folder may do: nothing is written
            StudyFolder(options.out).check_place(options.dataset.data)
        print(study.dry_run(out, **how))
        return 0
    if options.pilot:
        print(study.pilot(out, **how))
        return 0
    if study.data_sets:
        over = study.run_over_data(out, **how)
        print(f"{over}\n")
        for report in over.report():
            print(f"Report: {named(report)}")
        return _exit_code(over.complete, over.has_diverged, over.failed)
    result = study.run(out, **how)
    failed = []
    if options.confirm and result.complete and result.headline.together:
        confirmed = study.confirm(out, **how)
        confirmed.report()
        result, failed = Answer.load(out), confirmed.failed
    from vitmods.report import print_answer

    report = result.report()
    print_answer(result)
    print(f"Report: {named(report)}\nResults: {named(result.path / 'results.csv')}, results.json")
    return max(_exit_code(result.complete, result.has_diverged, result.failed), FAILED if failed else 0)


def _exit_code(complete: bool, has_diverged: bool, failed: Sequence[str]) -> int:
    """Print what is missing; returns the exit code. A budget that ends is no failure."""
    if complete:
        return FAILED if has_diverged else 0
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    print("The study is not complete; the same command runs what is missing.", file=sys.stderr)
    return FAILED if failed else 0


def _announce(options: Compare, budget: Budget, data_sets: Sequence[str], folder: str) -> None:
    """Print what is compared, before torch is imported and the images are listed."""
    settings, data, start = options.settings, options.dataset.data, options.start
    usual = "its arms" if start else "the most promising changes"
    arms = first_of(options.arms or (usual,), 6)
    count = options.max_seeds if settings.until_decided else options.seeds
    seeds = f"{'at most ' * settings.until_decided}{plural(count or settings.usual_seeds, 'seed')}"
    seeds += " each" * (not options.alone)
    if budget.seconds is not None and count is None:
        seeds = "as many seeds as the budget allows"
    bases = start or ", ".join(options.base)
    base = f"base ({bases})" if bases else "base"
    what = f"{f'Training {base}' if options.alone else f'Comparing {arms} with {base}'} on {data}, {seeds}"
    if options.retrain is not None:
        what = f"Training arm {options.retrain} of the study on all images of {data}"
    elif data_sets:
        what = f"Comparing {arms} with base on {first_of(data_sets, 6)}, a study for each"
    elif options.pretrain:
        first = options.pretrain_data or data
        what = f"Training {arms} and base by {options.pretrain} on {first}, then comparing them on {data}"
    time = []
    if options.dry_run:
        time = ["Nothing is trained: a few steps of each arm are timed."]
    elif options.pilot:
        time = ["Now only base is trained, on 4 seeds at most."]
    elif options.budget:
        may_be_late = budget.seconds is not None and count is None and not settings.until_decided
        limit = options.budget if budget.trials is None else plural(budget.trials, "trial")
        subject = "Each of the two studies" if options.confirm else "This run"
        time = [f"{subject} takes {'about' if may_be_late else 'at most'} {limit}."]
    announce(what, folder, *time)


def make_study(options: Compare, task: str | None = None, budget: Budget | None = None) -> Study:
    """Make the study of these options; base, which is part of every study, need not be an arm.

    task: if it is given. budget: which began with the command.
    """
    from vitmods.study import Study
    from vitmods.study.arms import BASE, split_training
    from vitmods.study.checkpoints import arm_names
    from vitmods.tasks.base import TASKS

    arms, settings, line_up = options.arms, options.settings, table_of(options.arms)
    train = options.training.overrides.get("train", ALL)
    if arms is None and not options.alone:
        arms = arm_names(options.start) if options.start else ()
        if options.start and not arms and "train" not in TASKS[options.dataset.task].unread:
            arms = tuple(arm for arm in ARMS_OF_TRAINED if split_training(arm)[1]["train"] != train)
        arms = arms or (PROMISING,)
    names_of_base = {BASE, "full"} if train == ALL else {BASE}
    for arm in sorted(names_of_base.intersection(map(str.strip, arms or ()))):
        subject = BASE if arm == BASE else f"{arm}, which is base here,"
        note(f"{subject} is always part of a study and need not be given as an arm.")
    metric = settings.metric
    if options.protocols != Options():
        of_table = line_up and (line_up.metric or measure_of(task or line_up.task).name)
        usual = of_table or measure_of(options.dataset.task).name
        metric = Measure(metric.name if isinstance(metric, Measure) else usual, options.protocols)
    return Study(
        options.base or None,
        arms and [arm for arm in arms if arm.strip() not in names_of_base],
        options.dataset.data,
        options.training,
        seeds=options.max_seeds if settings.until_decided else options.seeds,
        task=task or (None if line_up else options.dataset.task),  # of a table it is the task of that
        start=options.start,
        pretrain=options.pretrain,
        pretrain_data=options.pretrain_data,
        match=options.match,
        budget=budget,
        settings=replace(settings, metric=metric),
        images=options.dataset,
    )
