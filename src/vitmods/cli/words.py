"""Write words.json, which completion and the check of words read: `python -m vitmods.cli.words`."""

from __future__ import annotations

import importlib
import json
from typing import Any

from vitmods.adapters.libraries import LIBRARIES
from vitmods.changes import REGISTRY
from vitmods.cli.completion import INDEX, count_files
from vitmods.cli.options import accepted
from vitmods.data.sources import SOURCES
from vitmods.evals.base import PROTOCOLS
from vitmods.evals.protocols import OTHER_WORDS, metrics
from vitmods.finetune.roles import ALL, ROLES
from vitmods.model.names import SIZES
from vitmods.recipes.recipe import fields_by_name
from vitmods.recipes.registry import RECIPES, evidence, settings_of
from vitmods.study.arms import BASE, LINE_UPS, PYTHON, TRAINING
from vitmods.tasks.base import TASKS, WITHOUT_LABELS
from vitmods.train.loggers import LOGGERS
from vitmods.util.registry import Registry

CLASSES = {
    "compare": "vitmods.cli.compare:Compare",
    "base": "vitmods.cli.compare:Base",
    "train": "vitmods.cli.train:Train",
    "pretrain": "vitmods.cli.train:Pretrain",
    "finetune": "vitmods.cli.finetune:Finetune",
    "analyse": "vitmods.analysis.command:Analyse",
    "evaluate": "vitmods.cli.evaluate:Evaluate",
    "predict": "vitmods.cli.predict:Predict",
    "report": "vitmods.cli.report:Report",
    "decide": "vitmods.cli.report:Decide",
    "changes": "vitmods.cli.changes:Changes",
    "paper": "vitmods.papers.command:List",
    "paper list": "vitmods.papers.command:List",
    "paper show": "vitmods.papers.command:ShowTable",
    "paper claims": "vitmods.papers.command:Claims",
    "recipes": "vitmods.cli.recipe:Recipes",
    "recipe show": "vitmods.cli.recipe:Show",
    "diff": "vitmods.cli.changes:DiffOptions",
    "data": "vitmods.cli.data:Data",
    "data pack": "vitmods.cli.data:Pack",
    "bench": "vitmods.cli.bench:Bench",
    "export": "vitmods.cli.export:Export",
}
"""command -> the class of its options"""


def make_index() -> dict[str, Any]:
    """Collect what each command accepts, and the names of each kind with their settings."""
    commands: dict[str, dict[str, Any]] = {}
    for command, place in CLASSES.items():
        module, _, name = place.partition(":")
        positional, options = accepted(getattr(importlib.import_module(module), name))
        commands[command] = {"positional": positional, "options": options}
    options = {**commands["bench"]["options"], **commands["compare"]["options"]}  # by the kind of table
    commands["paper run"] = {"positional": ["<table>"], "options": options}
    papers = importlib.import_module("vitmods.papers.table")
    figures = importlib.import_module("vitmods.analysis.figure").FIGURES
    changes = {name: list(kind.settings()) for name, kind in REGISTRY.items()}
    short_forms = {short: changes[name] for name, kind in REGISTRY.items() for short in kind.short_forms}
    line_ups = [f"paper:{table.name}" for table in papers.TABLES.values() if table.study]
    line_ups += [table.also for table in papers.TABLES.values() if table.also]
    line_ups += [name for name, find in LINE_UPS.items() if find(name)]
    usages = [kind.usage.partition(":") for kind in SOURCES.values()]
    unlabeled = [task for task in TASKS if TASKS[task].target in WITHOUT_LABELS]
    unlabeled += [name for name in RECIPES if evidence(name).task in unlabeled]
    names: dict[str, Any] = {
        "change": changes | short_forms,
        "recipe": {name: list(settings_of(RECIPES[name])) for name in RECIPES},
        "arm": [BASE, *TRAINING, *line_ups],
        "role": dict.fromkeys((*ROLES, ALL), ()),
        "task": list(TASKS),
        "task without labels": {name: [*fields_by_name(), "metric"] for name in unlabeled},
        "metric": list(metrics()),
        "protocol": list(PROTOCOLS),
        "table": list(papers.TABLES),
        "paper": list(papers.PAPERS),
        "figure": ["all", *figures],
        "field": [*fields_by_name(), "base", "data", "limit_train"],
        "data": [name + colon for name, colon, _ in usages if name in SOURCES],
        "model": [*(f"{size}/16" for size in SIZES), *(f"{library}:" for library in (*LIBRARIES, PYTHON))],
        "logger": list(LOGGERS),
        "device": ["auto", "cpu", "cuda", "mps"],
    }
    registries: tuple[Registry[Any], ...] = REGISTRY, RECIPES, TASKS, PROTOCOLS, papers.TABLES, papers.PAPERS, figures
    checked = {registry.kind: {"words": dict(registry.words), "advice": registry.advice} for registry in registries}
    checked["metric"] = {"words": OTHER_WORDS, "advice": ""}
    checked |= {kind: {"words": {}, "advice": ""} for kind in ("role", "logger", "field", "task without labels")}
    return {"files": {"count": count_files()}, "commands": commands, "names": names, "checked": checked}


def text_of(index: dict[str, Any]) -> str:
    """Write the index as JSON, with one line for each command and each kind of names."""
    parts = [
        f" {json.dumps(part)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        + "\n }"
        for part, values in index.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    INDEX.write_text(text_of(make_index()), encoding="utf-8")
