"""What a study writes down about its arms and its machine, so that the report needs no model."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from vitmods.bench import device_name
from vitmods.finetune.roles import ALL
from vitmods.recipes import Recipe
from vitmods.study.arms import Arm
from vitmods.study.bases import Base, base_name, model_facts
from vitmods.study.plan import VAL, Measure, Settings, make_measure, measure_of
from vitmods.study.store import ChangeFacts, ModelFacts

PACKAGES = ("vitmods", "torch", "torchvision", "timm", "numpy")


def describe_model(settings: Settings, arm: Arm, model: nn.Module, images: Base) -> ModelFacts:
    """The arm's model and what its changes are, for a reader who does not know them."""
    changes = [ChangeFacts(str(change), **change.describe()) for change in arm.changes]
    if arm.start is not None:
        changes.append(
            ChangeFacts(
                f"from {arm.start}",
                "Begins with trained weights of its own",
                f"Its weights are those of {arm.start}; base begins with its own.",
            )
        )
    if "train" in arm.recipe:
        changes.append(_describe_training(arm.recipe["train"]))
    base, start = settings.fixed["base"], settings.fixed.get("start")
    name = start["source"] if start else base_name(base)
    return ModelFacts(arm.start or name, model_facts(model, images), tuple(changes))


def _describe_training(what: str) -> ChangeFacts:
    """What is trained, reported as a change is."""
    everything = what == ALL
    return ChangeFacts(
        f"train({what})",
        "All is trained" if everything else f"Trains {' and '.join(what.split('+'))} alone",
        "Nothing is frozen."
        if everything
        else "The head is trained along, and with more than the head the positions; all else is frozen.",
        paper="Touvron et al., 2022, Three things everyone should know about Vision Transformers, section 4",
        url="https://arxiv.org/abs/2203.09795",
    )


def python_call(settings: Settings, out: str) -> str:
    """The lines of Python that run this study, for a report whose study was not started from the shell."""
    fixed = dict(settings.fixed)
    base, start, usual = fixed.pop("base"), fixed.pop("start", None), Recipe().settings()
    recipe = {name: value for name, value in settings.recipe.settings().items() if value != usual[name]}
    data, _ = fixed.pop("data"), fixed.pop("recipe")
    from_size = repr(str(base)) if isinstance(base, str) else f"vm.ViTConfig.from_dict({base!r})"
    fields = {
        **({"start": repr(start["source"])} if start else {"base": from_size}),
        "arms": f"[{', '.join(map(_arm_call, settings.factors))}]",
        "data": repr(data),
        "recipe": f"vm.Recipe().with_({', '.join(f'{name}={value!r}' for name, value in recipe.items())})",
        "seeds": repr(list(settings.seeds)),
        **{name: repr(value) for name, value in fixed.items()},
        **_measure_call(settings.measure, settings.fixed["task"]),
        "margin": repr(settings.margin),
        "generalize": repr(settings.generalize),
        **({"family": repr(settings.family)} if settings.family else {}),
        **({"until_decided": "True"} if settings.until_decided else {}),
        **({"design": "'factorial'", "runs": repr(len(settings.design.design.runs))} if settings.design else {}),
        **({"sweep": repr(settings.sweep.to_dict())} if settings.sweep else {}),
        **(_tuning_call(settings) if settings.grid else {}),
    }
    arguments = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"import vitmods as vm\nfrom vitmods.study import Arm, parse_edits\n\nvm.Study({arguments}).run({out!r})"


def _tuning_call(settings: Settings) -> dict[str, str]:
    seeds = {"same_seeds": "True"} if settings.same_seeds else {"tuning_seeds": repr(len(settings.tuning_seeds))}
    return {"tune": repr(settings.grid.to_dict()), "tune_on": repr(VAL), **seeds}


def _measure_call(measure: Measure, task: str) -> dict[str, str]:
    if measure == make_measure(measure.name):
        return {} if measure == measure_of(task) else {"metric": repr(measure.name)}
    return {"metric": f"vm.study.Measure.from_dict({measure.to_dict()!r})"}


def _arm_call(arm: Arm) -> str:
    overrides = f", {dict(arm.recipe)!r}" if arm.recipe else ""
    begins = f", start={arm.start!r}" if arm.start else ""
    return f"Arm({arm.name!r}, parse_edits({arm.short!r}){overrides}{begins})"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine, as far as a number may depend on them."""
    return {
        "python": platform.python_version(),
        "packages": {package: installed for package in PACKAGES if (installed := _version(package))},
        "system": platform.platform(),
        "device": device.type,
        "device_name": device_name(device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
