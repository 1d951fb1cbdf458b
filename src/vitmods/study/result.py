"""The answer of a study as a Python object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitmods.stats.effects import Effect
from vitmods.study.arms import BASE
from vitmods.study.results import assemble, every_trial, write_results
from vitmods.study.store import StudyFolder
from vitmods.util.errors import UserError, nearest


class StudyResult:
    """What came out. Prints itself as the table of verdicts; `result["dpn"]` is that arm's `Effect`.

    effects:  arm -> Effect, in the order of the study
    complete: whether every trial has come to an end
    path:     the study's folder
    """

    def __init__(self, results: dict[str, Any], path: str | Path):
        self._results, self.path = results, Path(path)
        self.effects = {arm["name"]: Effect.from_dict(arm["effect"]) for arm in results["arms"]}

    @classmethod
    def load(cls, path: str | Path) -> StudyResult:
        """The study in a folder, finished or not, rebuilt from its trials. UserError where there is none."""
        return cls(assemble(StudyFolder(path)), path)

    @property
    def complete(self) -> bool:
        return bool(self._results["complete"])

    @property
    def failed(self) -> list[str]:
        """A line for each trial that failed in the last run."""
        failed = [one for one in every_trial(self._results) if one[2]["status"] == "failed"]
        return [
            ", ".join(filter(None, (name, point, f"seed {trial['seed']}: {trial['message']}")))
            for name, point, trial in failed
        ]

    @property
    def chosen(self) -> dict[str, dict[str, Any] | None]:
        """Arm, base too -> the values of the point that it is evaluated by; None before the choice. Empty where nothing
        was tuned."""
        if self._results["tuned"] is None:
            return {}
        arms = [{**self._results["base"], "name": BASE}, *self._results["arms"]]
        return {arm["name"]: arm["tuning"]["chosen"] for arm in arms}

    def __getitem__(self, arm: str) -> Effect:
        if arm not in self.effects:
            raise UserError(f"The study has no arm {arm!r}. {nearest(arm, self.effects)}")
        return self.effects[arm]

    def __repr__(self) -> str:
        from vitmods.study.table import render

        return render(self._results)

    def to_dict(self) -> dict[str, Any]:
        """What results.json holds."""
        return self._results

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report as one HTML file, by default report.html in the study's folder; returns its path.

        It shows these results, so results.json and results.csv are written with it. UserError if that cannot be.
        """
        from vitmods.report import write_report

        write_results(StudyFolder(self.path), self._results)
        return write_report(self.path, path)
