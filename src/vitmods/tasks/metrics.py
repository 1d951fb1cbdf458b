"""What is measured: names, units and which way is better. Imports without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One number that a protocol of `vitmods.evals` gives, and perhaps a task's own evaluation too.

    Fractions (unit "%") are kept as fractions and shown as percent; all others are shown as they are.
    """

    name: str
    title: str
    protocol: str
    higher_is_better: bool = True
    unit: Literal["%", "nats", ""] = "%"

    def number(self, value: float) -> str:
        """The value for a reader: percent of a fraction, without the unit."""
        return f"{100 * value:.2f}" if self.unit == "%" else f"{value:.4f}"

    def shown(self, value: float) -> str:
        """The value with its unit."""
        return f"{self.number(value)} {self.unit}".rstrip()
