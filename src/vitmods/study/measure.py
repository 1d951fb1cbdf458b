"""What a study compares: a metric, and the options of the protocol that gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.evals.options import Options
from vitmods.util.errors import UserError

if TYPE_CHECKING:
    from vitmods.tasks.metrics import Metric

PAPERS = Options()
MARGINS = {"%": 0.5, "nats": 0.01, "": 0.01}
"""by the metric's unit; in points for shares"""


@dataclass(frozen=True)
class Measure:
    """A metric of `vitmods.evals.metrics()` by its name, and options of the protocols."""

    name: str
    options: Options = PAPERS

    @property
    def metric(self) -> Metric:
        """Its title, unit, direction and protocol. UserError, naming the nearest, where there is none of that name."""
        from vitmods.evals.protocols import metric_named

        return metric_named(self.name)

    def to_dict(self) -> dict[str, Any]:
        """As JSON gives it back."""
        return {"name": self.name, "options": {name: _plain(value) for name, value in asdict(self.options).items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measure:
        """The inverse of `to_dict`; options that are not named have their defaults."""
        return cls(values["name"], options_from(values.get("options", {})))


def measure_of(task: str) -> Measure:
    """The metric that trials of a task are compared by, where nothing else is asked. UserError for an unknown task."""
    from vitmods.tasks.base import TASKS

    return Measure(TASKS[task].metrics[0].name)


def make_measure(name: str, options: Options | None = None) -> Measure:
    """What users ask for; of few-shot accuracies the one that is asked for is measured.

    Raises:
        UserError: there is no such metric, its protocol does not give it with these options, or has no such option.
    """
    from vitmods.evals.base import PROTOCOLS
    from vitmods.evals.protocols import metric_named, options_for, unread

    given, protocol = options or PAPERS, metric_named(name).protocol
    asked = options_for(name, given)
    ignored = unread(given, [PROTOCOLS[protocol]] if protocol else [])
    if given.shots not in (PAPERS.shots, asked.shots):  # the metric's name says how many
        ignored.append("shots")
    for option in ignored:
        raise UserError(
            f"The metric {name} does not depend on {option}={getattr(given, option)}: leave --{option} out."
        )
    return Measure(name, asked)


def options_from(values: Mapping[str, Any]) -> Options:
    """Options of the protocols from JSON."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if given.get("textures") is not None:
        given["textures"] = Path(given["textures"])
    return Options(**given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
