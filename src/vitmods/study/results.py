"""From the files of a study to its answer: effects, costs and every trial's end, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitmods import __version__
from vitmods.files import write_json
from vitmods.study.plan import BASE, OTHER_SEEDS, Settings, Trial
from vitmods.study.stats import Scores, effects, noise_floor
from vitmods.study.store import WARNINGS, StudyFolder, read_json, write_text

SCHEMA = 1


@dataclass(frozen=True)
class TrialEnd:
    """How a trial stands: `finished`, `diverged`, `failed` (the next run tries again) or `unfinished`."""

    trial: Trial
    status: str
    folder: str
    metrics: Mapping[str, float]
    wall_s: float | None
    message: str | None

    def score(self, metric: str) -> float | None:
        return self.metrics.get(metric) if self.status == "finished" else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.trial.seed,
            "status": self.status,
            "folder": self.folder,
            "wall_s": self.wall_s,
            "message": self.message,
        }


def trial_ends(folder: StudyFolder, settings: Settings) -> list[TrialEnd]:
    """Every planned trial as its folder tells."""
    ends = []
    for trial in settings.trials():
        path = folder.trial(trial.arm.name, trial.seed)
        result = read_json(path / "result.json") or {}
        ends.append(
            TrialEnd(
                trial,
                result.get("status", "unfinished"),
                path.relative_to(folder.path).as_posix(),
                result.get("metrics") or {},
                result.get("wall_s"),
                result.get("message"),
            )
        )
    return ends


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
    ends = trial_ends(folder, settings)
    metric = facts["metric"]["name"]
    arms = [arm.name for arm in settings.arms]
    scores: dict[str, dict[int, float | None]] = {name: {} for name in (BASE, *arms)}
    for end in ends:
        scores[end.trial.arm.name][end.trial.seed] = end.score(metric)
    base = {seed: scores[BASE][seed] for seed in settings.seeds}
    found = effects(base, {arm: scores[arm] for arm in arms}, settings.margin, diverged=_diverged(ends))
    costs = read_json(folder.costs_file) or {"base": None, "arms": {}}

    def told(name: str) -> dict[str, Any]:
        kept = base if name == BASE else scores[name]
        return {
            "values": {str(seed): score for seed, score in kept.items()},
            "trials": [end.to_dict() for end in ends if end.trial.arm.name == name],
        }

    return {
        "schema": SCHEMA,
        "vitmods": __version__,
        "created": facts["created"],
        "metric": facts["metric"],
        "margin": settings.margin,
        "base": {**facts["base"], "mean": _mean(base), **told(BASE)},
        "arms": [
            {
                "name": arm.name,
                "changes": arm.text,
                "recipe": dict(arm.recipe),
                **facts["arms"][arm.name],
                "effect": found[arm.name].to_dict(),
                "cost": costs["arms"].get(arm.name),
                **told(arm.name),
            }
            for arm in settings.arms
        ],
        "cost_base": costs["base"],
        "data": facts["data"],
        "recipe": facts["settings"]["recipe"],
        "resolved": facts.get("resolved", {}),
        "settings": facts["settings"],
        "environment": facts["environment"],
        "warnings": [*facts["data"].get("warnings", ()), *facts.get("warnings", ()), *_warnings(folder, ends)],
        "command": facts["command"],
        "noise_floor": _noise_floor(settings, scores[BASE]) if settings.noise_floor else None,
        "complete": all(end.status in ("finished", "diverged") for end in ends),
    }


def write_results(folder: StudyFolder, results: Mapping[str, Any]) -> None:
    """results.json, and results.csv with a row a trial."""
    write_json(folder.results_file, results)
    write_text(folder.csv_file, _as_csv(folder, results))


def _as_csv(folder: StudyFolder, results: Mapping[str, Any]) -> str:
    """arm, changes, seed, status, the metrics (fractions), and the paired difference to base in points."""
    metric = results["metric"]["name"]
    names = [metric, *(name for name in ("top5", "loss") if name != metric)]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["arm", "changes", "seed", "status", *names, "difference_points", "wall_s", "folder"])
    base = results["base"]["values"]
    for arm in [{**results["base"], "name": BASE, "changes": ""}, *results["arms"]]:
        for trial in arm["trials"]:
            metrics = (read_json(folder.path / trial["folder"] / "result.json") or {}).get("metrics") or {}
            pair = (arm["values"].get(str(trial["seed"])), base.get(str(trial["seed"])))
            difference = "" if None in pair or arm["name"] == BASE else 100 * (pair[0] - pair[1])
            told = [metrics.get(name, "") for name in names]
            start = [arm["name"], arm["changes"], trial["seed"], trial["status"]]
            rows.writerow([*start, *told, difference, trial["wall_s"], trial["folder"]])
    return text.getvalue()


def _noise_floor(settings: Settings, base: Scores) -> dict[str, Any]:
    other = {seed + OTHER_SEEDS: base[seed + OTHER_SEEDS] for seed in settings.seeds}
    floor = noise_floor({seed: base[seed] for seed in settings.seeds}, other)
    return {**floor.to_dict(), "values": {str(seed): score for seed, score in other.items()}}


def _diverged(ends: Iterable[TrialEnd]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for end in ends:
        if end.status == "diverged":
            counts[end.trial.arm.name] = counts.get(end.trial.arm.name, 0) + 1
    return counts


def _warnings(folder: StudyFolder, ends: Sequence[TrialEnd]) -> list[str]:
    telling = {"diverged": "diverged", "failed": "failed"}
    told = [f"{end.trial} {telling[end.status]}: {end.message}" for end in ends if end.status in telling]
    for end in ends:
        told += [f"{end.trial}: {warning}" for warning in read_json(folder.path / end.folder / WARNINGS) or ()]
    return told + _different_environments(folder, ends)


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


def _mean(scores: Scores) -> float | None:
    known = [score for score in scores.values() if score is not None]
    return sum(known) / len(known) if known else None
