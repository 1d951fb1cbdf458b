"""The answer of a study as a Python object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitmods.errors import UserError, nearest
from vitmods.study.results import assemble, write_results
from vitmods.study.stats import Effect
from vitmods.study.store import StudyFolder


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
        trials = [("base", trial) for trial in self._results["base"]["trials"]]
        trials += [(arm["name"], trial) for arm in self._results["arms"] for trial in arm["trials"]]
        failed = [(name, trial) for name, trial in trials if trial["status"] == "failed"]
        return [f"{name}, seed {trial['seed']}: {trial['message']}" for name, trial in failed]

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
        from vitmods.study.report import write_report

        write_results(StudyFolder(self.path), self._results)
        return write_report(self.path, path)
