"""What a protocol finds."""

from dataclasses import dataclass, field
from typing import Any

from vitmods.stats.intervals import Interval


@dataclass(frozen=True)
class ProtocolResult:
    """Numbers by the names of `METRICS`, their 95 % intervals where there are any, and JSON-able details."""

    metrics: dict[str, float]
    detail: dict[str, Any] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        intervals = {name: list(ends) for name, ends in self.intervals.items()}
        return {"metrics": self.metrics, "intervals": intervals, "detail": self.detail}
