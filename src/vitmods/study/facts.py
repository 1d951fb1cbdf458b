"""What study.json holds: all that is known of a study before its first trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

SCHEMA = 3  # of study.json and results.json


@dataclass(frozen=True)
class ChangeFacts:
    """What a change is, for a reader who does not know it."""

    short: str
    title: str
    summary: str
    name: str = ""
    paper: str = ""
    url: str = ""
    preserves: str = ""
    published: str = ""
    cost: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """A model as the report draws it: its config, and the changes that made it."""

    name: str
    config: Mapping[str, Any]
    changes: tuple[ChangeFacts, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How many seeds were planned (0: not known), at most where the study runs until it is decided; what verdicts were
    to be about, by which metric; and how many arms were planned (0: not known)."""

    seeds: int = 0
    until_decided: bool = False
    generalize: str = "images"
    metric: str = ""
    family: int = 0


@dataclass(frozen=True)
class Facts:
    """All of study.json.

    splits:   that the answer is about
    settings: as `Settings.to_dict` gives them
    models:   arm -> its model, base first
    margins:  metric -> the margin of the first run that knew no score of it
    plan:     seeds of the last run that knew no score
    """

    created: str
    command: str
    splits: tuple[str, ...]
    settings: Mapping[str, Any]
    models: Mapping[str, ModelFacts]
    data: Mapping[str, Any]
    resolved: Mapping[str, Any]
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    margins: Mapping[str, float] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    plan: Plan = Plan()

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        """The inverse of `to_dict`. TypeError or KeyError where `values` are others."""
        known = {one.name: values[one.name] for one in fields(cls)}
        for name, kind in get_type_hints(cls).items():
            if not _fits(known[name], kind):
                raise TypeError(f"{name} is {known[name]!r:.60}")
        for section, kinds in _WITHIN.items():
            for name, value in known[section].items():
                if not _fits(value, kinds.get(name, Any)):
                    raise TypeError(f"{name} of {section} is {value!r:.60}")
        models = {
            name: ModelFacts(model["name"], model["config"], tuple(ChangeFacts(**one) for one in model["changes"]))
            for name, model in known["models"].items()
        }
        texts = {name: tuple(known[name]) for name in ("splits", "warnings", "plugins")}
        return cls(**{**known, **texts, "models": models, "plan": Plan(**known["plan"])})


_WITHIN: Mapping[str, Mapping[str, Any]] = {
    "settings": {"task": str, "margin": float, "until_decided": bool, "generalize": str},
    "data": {
        "splits": Mapping[str, Mapping[str, Any]],
        "constant": Mapping[str, float],
        "warnings": tuple[str, ...],
    },
}
"""what is read of sections that are kept as they are"""


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON's value can be of a type that the facts have."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return isinstance(value, Mapping) and all(_fits(one, hints[name]) for name, one in value.items())
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(one, parts[1]) for one in value.values())
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(one, parts[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return kind is Any or type(value) is kind
