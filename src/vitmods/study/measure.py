"""What a study compares: a metric, and the options of the protocol that gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitmods.errors import UserError
from vitmods.evals.options import Options

if TYPE_CHECKING:
    from vitmods.evals.metrics import Metric

TOP1 = "top1"
PAPERS = Options()
MARGINS = {"%": 0.5, "nats": 0.01, "": 0.01}
"""by the metric's unit; in points for shares"""


@dataclass(frozen=True)
class Measure:
    """A metric of `vitmods.evals.protocols.METRICS` by its name, and options of the protocols."""

    name: str = TOP1
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
        return cls(values.get("name", TOP1), options_from(values.get("options", {})))


DEFAULT = Measure()
_READ = {"corruptions": ("corruptions", "severities", "textures")}
"""what a protocol reads of the options, but for the shots, which the metric's name says"""


def make_measure(name: str, options: Options | None = None) -> Measure:
    """What users ask for; of few-shot accuracies the one that is asked for is measured.

    Raises:
        UserError: there is no such metric, its protocol does not give it with these options, or has no such option.
    """
    from vitmods.evals.protocols import metric_named, options_for

    given, protocol = options or PAPERS, metric_named(name).protocol
    asked = options_for(name, given)
    for field in fields(Options):
        value = getattr(given, field.name)
        said_by_name = protocol == "fewshot" and value == getattr(asked, field.name)
        if value != getattr(PAPERS, field.name) and field.name not in _READ.get(protocol, ()) and not said_by_name:
            raise UserError(f"The metric {name} does not depend on {field.name}={value}: leave --{field.name} out.")
    return Measure(name, asked)


def options_from(values: Mapping[str, Any]) -> Options:
    """Options of the protocols from JSON."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if given.get("textures") is not None:
        given["textures"] = Path(given["textures"])
    return Options(**given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
