"""A factorial study: arms that are switched on and off together, and the runs that are trained of them.

A run is an ordinary arm, `dpn+rms`, with the edits and the recipe overrides of its changes joined. The runs are chosen
once, kept in study.json and never chosen again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from vitmods.stats.design import Design, plan_factorial
from vitmods.study.arms import BASE, Arm

if TYPE_CHECKING:
    from vitmods.changes import Change


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
        return Arm("+".join(one.name for one in chosen), sum((one.changes for one in chosen), ()), recipe)

    def continuing(self, recorded: FactorialPlan) -> FactorialPlan:
        """The recorded runs where they are as many, of the same changes; else these."""
        mine, theirs = ({one.name: one.identity() for one in plan.factors} for plan in (self, recorded))
        if mine != theirs or len(self.design.runs) != len(recorded.design.runs):
            return self
        own = {factor.name: factor for factor in self.factors}
        return FactorialPlan(tuple(own[name] for name in recorded.design.changes), recorded.design)

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
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
        """The inverse of `to_dict`. KeyError or TypeError where `values` are none."""
        factors = tuple(Arm.from_identity(name, one) for name, one in values["factors"].items())
        design = Design(
            tuple(factor.name for factor in factors),
            tuple(map(frozenset, values["runs"])),
            tuple((first, second) for first, second in values["conflicts"]),
            tuple(values["left_out"]),
        )
        return cls(factors, design)


def make_plan(arms: Sequence[Arm], fixed: Mapping[str, Any], runs: int | None) -> FactorialPlan:
    """The runs for these arms of a study with `fixed` settings. UserError where there is no such design."""
    from vitmods.changes.compose import in_order
    from vitmods.model.config import ViTConfig
    from vitmods.study.bases import make_base

    base = make_base(fixed["base"], 2, fixed["img_size"], fixed["in_chans"])
    config = base if isinstance(base, ViTConfig) else None
    order = in_order({arm.name: _changes(arm) for arm in arms}, config)
    by_name = {arm.name: arm for arm in arms}
    design = plan_factorial(order, _conflicts(arms, config), runs)
    return FactorialPlan(tuple(by_name[name] for name in design.changes), design)


def _conflicts(arms: Sequence[Arm], config: Any) -> list[tuple[str, str]]:
    """Pairs of arms that cannot be one: their changes exclude each other, both replace norms or set one field of the
    recipe, or one begins with weights of its own."""
    from vitmods.changes.compose import conflicts

    found = list(conflicts({arm.name: _changes(arm) for arm in arms}, config))
    for first, second in combinations(arms, 2):
        fields = set(first.recipe) & set(second.recipe)
        if fields or first.start or second.start or (_replaces(first) and _replaces(second)):
            found.append((first.name, second.name))
    return found


def _changes(arm: Arm) -> list[Change]:
    from vitmods.changes import Change

    return [edit for edit in arm.changes if isinstance(edit, Change)]


def _replaces(arm: Arm) -> bool:
    from vitmods.study.arms import Replace

    return any(isinstance(edit, Replace) for edit in arm.changes)
