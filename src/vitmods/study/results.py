"""From the files of a study to its answer: effects, costs and every trial's end, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from vitmods import __version__
from vitmods.evals.protocols import metric_named
from vitmods.stats.effects import FRACTION, effects, noise_floor, scale_of
from vitmods.study.arms import BASE
from vitmods.study.plan import Settings
from vitmods.study.reading import Reading, TrialEnd
from vitmods.study.selection import Selection, seen_before
from vitmods.study.store import WARNINGS, StudyFolder, read_json, write_text
from vitmods.study.tuning import VAL, Point, mean_of, show_value
from vitmods.tasks.metrics import Metric
from vitmods.util.errors import UserError
from vitmods.util.files import write_json

SCHEMA = 1


def assemble(folder: StudyFolder, settings: Settings | None = None) -> dict[str, Any]:
    """Everything that results.json holds, read from the folder.

    Args:
        folder: a study's folder, finished or not.
        settings: its settings, if at hand; None: as the folder tells.

    Raises:
        UserError: the folder holds no study.
    """
    facts = folder.facts()
    settings = settings or Settings.from_dict(facts["settings"])
    reading = Reading(folder, settings, facts["metric"]["split"])
    metric, floor = settings.measure.metric, next((c for c in reading.selections if c.candidate.is_noise_floor), None)
    base, *arms = [selection for selection in reading.selections if selection is not floor]
    base_scores = reading.scores(base.candidate)
    found = effects(
        base_scores,
        {selection.candidate.arm.name: reading.scores(selection.candidate) for selection in arms},
        settings.margin,
        diverged={selection.candidate.arm.name: reading.diverged(selection.candidate) for selection in arms},
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
    )
    costs = read_json(folder.costs_file) or {"base": None, "arms": {}}

    def record(selection: Selection) -> dict[str, Any]:
        ends = reading.counted[selection.candidate]
        return {
            "values": {str(seed): score for seed, score in reading.scores(selection.candidate).items()},
            "other_metrics": reading.other_metrics(selection.candidate),
            "tuning": reading.tuning(selection),
            "trials": [end.to_dict() for end in ends],
        }

    base_record = record(base)
    if floor:
        base_record["trials"] += record(floor)["trials"]
    return {
        "schema": SCHEMA,
        "vitmods": __version__,
        "created": facts["created"],
        "metric": {**facts["metric"], **describe_metric(metric)},
        "other_metrics": {name: describe_metric(metric_of(name)) for name in reading.other_names},
        "margin": settings.margin,
        "tuned": {"fields": settings.grid.to_dict(), "on": VAL} if settings.grid else None,
        "base": {**facts["base"], "mean": mean_of(base_scores.values()), **base_record},
        "arms": [
            {
                "name": arm.name,
                "changes": arm.text,
                "recipe": dict(arm.recipe),
                **facts["arms"][arm.name],
                "effect": found[arm.name].to_dict(),
                "cost": costs["arms"].get(arm.name),
                **record(selection),
            }
            for selection, arm in zip(arms, settings.arms)
        ],
        "cost_base": costs["base"],
        "data": facts["data"],
        "recipe": facts["settings"]["recipe"],
        "resolved": facts.get("resolved", {}),
        "settings": facts["settings"],
        "environment": facts["environment"],
        "warnings": [*facts["data"].get("warnings", ()), *facts.get("warnings", ()), *_warnings(reading)],
        "command": facts["command"],
        "noise_floor": _noise_floor(reading, base, floor) if floor else None,
        "complete": all(end.status in ("finished", "diverged") for end in reading.ends),
    }


def write_results(folder: StudyFolder, results: Mapping[str, Any]) -> None:
    """results.json, and results.csv with a row a trial."""
    write_json(folder.results_file, results)
    write_text(folder.csv_file, _as_csv(folder, results))


def _as_csv(folder: StudyFolder, results: Mapping[str, Any]) -> str:
    """A row a trial: its metrics on the split of the answer as they are kept (shares as fractions), and the paired
    difference to base. In a tuned study also its point and its metric on val; of the others only chosen ones have."""
    settings, metric = Settings.from_dict(results["settings"]), results["metric"]
    reading = Reading(folder, settings, metric["split"])
    base, counted, on_val = results["base"]["values"], reading.counted_trials, reading.on_val
    names = [metric["name"], *results["other_metrics"]]
    fields = list(settings.grid.to_dict())
    tuned = [*fields, f"val_{metric['name']}"] if fields else []
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    difference = "difference_points" if metric["unit"] == FRACTION else "difference"
    rows.writerow(["arm", "changes", *tuned, "seed", "status", *names, difference, "wall_s", "folder"])
    order = [BASE, *(arm.name for arm in settings.arms)]
    for end in sorted(reading.ends, key=lambda end: order.index(end.trial.arm.name)):
        arm, point = end.trial.arm, end.trial.point
        own = [*(show_value(value) for _, value in point.values), on_val[end.trial]] if fields else []
        record = [end.metrics.get(name, "") if end.trial in counted else "" for name in names]
        pair = (record[0], base.get(str(end.trial.seed), ""))
        apart = arm.name != BASE and "" not in pair and None not in pair
        gap = scale_of(metric["unit"]) * (pair[0] - pair[1]) if apart else ""
        start = [arm.name, arm.text, *own, end.trial.seed, end.status]
        rows.writerow([*map(_no_formula, start), *record, gap, end.wall_s, end.folder])
    return text.getvalue()


def _no_formula(cell: Any) -> Any:
    """Text that a spreadsheet would run gets an apostrophe in front, as spreadsheets mark text; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def every_trial(results: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(arm, point, trial) of every planned trial in results.json; those that count stand as on the answer's split."""
    floor = results.get("noise_floor") or {}
    found = []
    for arm in [{**results["base"], "name": BASE}, *results["arms"]]:
        tunings = [arm.get("tuning"), floor.get("tuning") if arm["name"] == BASE else None]
        points = [point for tuning in tunings if tuning for point in tuning["points"]]
        found += [(arm["name"], str(Point.from_dict(p["values"])), trial) for p in points for trial in p["trials"]]
        if not points:
            found += [(arm["name"], "", trial) for trial in arm["trials"]]
    return found


def _noise_floor(reading: Reading, base: Selection, floor: Selection) -> dict[str, Any]:
    other = reading.scores(floor.candidate)
    found = noise_floor(reading.scores(base.candidate), other, unit=reading.measure.metric.unit)
    return {
        **found.to_dict(),
        "values": {str(seed): score for seed, score in other.items()},
        "other_metrics": reading.other_metrics(floor.candidate),
        "tuning": reading.tuning(floor),
    }


def describe_metric(metric: Metric) -> dict[str, Any]:
    """What a reader of a metric's numbers must know; results.json keeps it."""
    return {
        "name": metric.name,
        "title": metric.title,
        "unit": metric.unit,
        "higher_is_better": metric.higher_is_better,
    }


def metric_of(name: str) -> Metric:
    """The metric of that name; what training measures beside those of the protocols is a loss."""
    try:
        return metric_named(name)
    except UserError:
        return Metric(name, name, "", higher_is_better=False, unit="")


def _warnings(reading: Reading) -> list[str]:
    """What befell a trial; where points are tried, those that are not chosen may diverge."""
    folder, ends, counted = reading.folder, reading.ends, reading.counted_trials
    grave = [end for end in ends if end.status == "failed" or (end.status == "diverged" and end.trial in counted)]
    record = [f"{end.trial} {end.status}: {end.message}" for end in grave]
    for end in ends:
        record += [f"{end.trial}: {warning}" for warning in read_json(folder.path / end.folder / WARNINGS) or ()]
    for selection in reading.selections:
        record += _chosen_anew(folder, selection, reading.split)
    return record + _different_environments(folder, ends)


def _chosen_anew(folder: StudyFolder, selection: Selection, split: str) -> list[str]:
    before = seen_before(folder, selection, split) if selection.chosen else []
    if not before:
        return []
    points = " and ".join(map(str, before))
    return [
        f"{selection.candidate.arm.name}: {selection.chosen} is chosen now; with other seeds, values or another metric "
        f"it was {points}, which has been evaluated on {split} too."
    ]


def _different_environments(folder: StudyFolder, ends: Sequence[TrialEnd]) -> list[str]:
    """Pairs differ by more than the arm where one was trained elsewhere, or with other versions."""
    seen: dict[str, set[str]] = {}
    for end in ends:
        config = read_json(folder.path / end.folder / "config.json") or {}
        for name, value in config.get("environment", {}).items():
            seen.setdefault(name, set()).add(f"{name} {value}")
    several = [" and ".join(sorted(values)) for values in seen.values() if len(values) > 1]
    if not several:
        return []
    return [f"The trials were not all run alike ({'; '.join(several)}): small differences may come from that."]
