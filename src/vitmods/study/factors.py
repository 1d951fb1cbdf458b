"""A factorial study: arms that are switched on and off together, and the runs that are trained of them.

A run is an ordinary arm, `dpn+rms`, with the edits and the recipe overrides of its changes joined. The runs are chosen
once, kept in study.json and never chosen again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from vitmods.stats.design import Design, plan_factorial
from vitmods.study.arms import BASE, Arm, Replace


@dataclass(frozen=True)
class FactorialPlan:
    """The changes as arms, in the order in which a run has them, and which runs there are."""

    factors: tuple[Arm, ...]
    design: Design

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The runs, without base."""
        return tuple(self.run(names) for name, names in self.design.arms.items() if name != BASE)

    def run(self, names: Iterable[str]) -> Arm:
        """These changes together, whether that is one of the runs or not."""
        on = set(names)
        chosen = [factor for factor in self.factors if factor.name in on]
        recipe = {name: value for factor in chosen for name, value in factor.recipe.items()}
        return Arm("+".join(arm.name for arm in chosen), sum((arm.changes for arm in chosen), ()), recipe)

    def continuing(self, recorded: FactorialPlan) -> FactorialPlan:
        """The recorded runs where they are as many, of the same changes; else these."""
        changes, recorded_changes = ({arm.name: arm.identity() for arm in plan.factors} for plan in (self, recorded))
        if changes != recorded_changes or len(self.design.runs) != len(recorded.design.runs):
            return self
        by_name = {factor.name: factor for factor in self.factors}
        return FactorialPlan(tuple(by_name[name] for name in recorded.design.changes), recorded.design)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        design = self.design
        return {
            "kind": "factorial",
            "factors": {factor.name: factor.identity() for factor in self.factors},
            "runs": [[name for name in design.changes if name in run] for run in design.runs],
            "conflicts": [list(pair) for pair in design.conflicts],
            "left_out": list(design.left_out),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FactorialPlan:
        """The inverse of `to_dict`. Raises KeyError or TypeError for other values."""
        factors = tuple(Arm.from_identity(name, arm) for name, arm in values["factors"].items())
        design = Design(
            tuple(factor.name for factor in factors),
            tuple(map(frozenset, values["runs"])),
            tuple((first, second) for first, second in values["conflicts"]),
            tuple(values["left_out"]),
        )
        return cls(factors, design)


def make_plan(arms: Sequence[Arm], fixed: Mapping[str, Any], runs: int | None) -> FactorialPlan:
    """Choose the runs for these arms of a study with `fixed` settings. Raises UserError if no design exists.

    Two arms cannot be one if their changes exclude each other, if both replace norms or set one field of the recipe,
    or if one starts from its own weights.
    """
    from vitmods.changes import Change
    from vitmods.changes.compose import conflicts, in_order
    from vitmods.model.config import ViTConfig
    from vitmods.study.bases import make_base

    base = make_base(fixed["base"], 2, fixed["img_size"], fixed["in_chans"])
    config = base if isinstance(base, ViTConfig) else None
    changes = {arm.name: [edit for edit in arm.changes if isinstance(edit, Change)] for arm in arms}
    excluding = list(conflicts(changes, config))
    replaces = {arm.name for arm in arms if any(isinstance(edit, Replace) for edit in arm.changes)}
    for first, second in combinations(arms, 2):
        shared = set(first.recipe) & set(second.recipe) or {first.name, second.name} <= replaces
        if shared or first.start or second.start:
            excluding.append((first.name, second.name))
    by_name = {arm.name: arm for arm in arms}
    design = plan_factorial(in_order(changes, config), excluding, runs)
    return FactorialPlan(tuple(by_name[name] for name in design.changes), design)
