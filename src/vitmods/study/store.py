"""The study on disk: one folder, one lock, every file whole or absent.

study.json                      the settings that define the study
trials/<arm>/seed<k>/           one trial each; its result.json is written last
trials/<arm>/<point>/seed<k>/   the same where recipe fields are tuned; the point is named as lr=0.001,weight_decay=0.1
  val.json  test.json           in a trial: what its final weights reach on a split, by protocol; where the training did
                                not measure that itself. In a tuned study chosen points alone have a test.json
costs.json                      what each arm costs, measured once
results.json  results.csv       rebuilt from the trials at any time
samples.npz                     a few images for the report
logs/worker<i>.txt              what a worker process printed
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitmods.study.measure import Measure, options_from
from vitmods.study.plan import Evaluation, Trial, Work
from vitmods.study.same import differences
from vitmods.util.errors import UserError
from vitmods.util.files import disk_errors, make_folder, write_atomically, write_json
from vitmods.util.registry import check_plugins

WARNINGS = "warnings.json"  # in a trial's folder: what the report should tell about it
ORPHAN_GRACE_S = 10.0  # workers of a killed run notice within milliseconds; a loaded machine may take a little longer


def read_json(path: Path, *keys: str) -> Any | None:
    """The parsed file, or None where there is none. UserError when it is no JSON (every file here is written whole), or
    lacks one of the keys."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in keys if not isinstance(found, dict) or key not in found]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove it and run the same command again.") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically. UserError when the disk is full or may not be written."""
    write_atomically(path, lambda file: file.write(text.encode()))


def slug(name: str, also: str = "") -> str:
    """A folder name for an arm or a point: the name itself where it is plain, else what is plain of it and a hash.

    Plain are letters, digits, `_`, `+`, `-` and the characters of `also`.
    """
    plain = re.sub(rf"[^A-Za-z0-9_+{also}-]+", "-", name).strip("-")[:60]
    if plain == name and plain:
        return plain
    return f"{plain or 'arm'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class StudyFolder:
    """The paths and files of one study."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"StudyFolder({str(self.path)!r})"

    @property
    def settings_file(self) -> Path:
        return self.path / "study.json"

    @property
    def costs_file(self) -> Path:
        return self.path / "costs.json"

    @property
    def results_file(self) -> Path:
        return self.path / "results.json"

    @property
    def csv_file(self) -> Path:
        return self.path / "results.csv"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.npz"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def trial(self, trial: Trial) -> Path:
        arm = self.path / "trials" / slug(trial.arm.name)
        return (arm / slug(str(trial.point), "=.,") if trial.point else arm) / f"seed{trial.seed}"

    def trial_result(self, trial: Trial) -> dict[str, Any] | None:
        """How its training ended (`finished` or `diverged`); None while that is to come, also after a failure."""
        result = self.result(trial)
        return None if result.get("status") in (None, "failed") else result

    def result(self, trial: Trial) -> dict[str, Any]:
        """What its result.json holds, empty without one; a damaged one is a failure of this trial alone."""
        try:
            return read_json(self.trial(trial) / "result.json", "status", "metrics") or {}
        except UserError as error:
            return {"status": "failed", "metrics": {}, "message": str(error)}

    def metrics(self, trial: Trial, split: str, measure: Measure) -> dict[str, float]:
        """All that is known of the final weights on a split: what the training reported, and what protocols found.

        What a protocol found with other options is not known.
        """
        result = self.trial_result(trial) or {}
        trained = result.get("metrics", {}) if result.get("split") == split else {}
        found = self.found(trial, split)["protocols"].values()
        asked = [one["metrics"] for one in found if options_from(one["options"]) == measure.options]
        return {name: value for metrics in (*asked, trained) for name, value in metrics.items()}

    def found(self, trial: Trial, split: str) -> dict[str, Any]:
        """What <split>.json of a trial holds."""
        empty = {"schema": 1, "split": split, "protocols": {}, "failed": None}
        return read_json(self.trial(trial) / f"{split}.json") or empty

    def is_done(self, work: Work, split: str, measure: Measure) -> bool:
        """Whether a trial has diverged, or finished and has its metric on a split; whether an evaluation has that."""
        if isinstance(work, Evaluation):
            return measure.name in self.metrics(work.trial, work.split, measure)
        result = self.trial_result(work)
        return result is not None and (
            result["status"] == "diverged" or measure.name in self.metrics(work, split, measure)
        )

    def record_failure(self, work: Work, split: str, reason: str) -> None:
        """For work that ended without a word of its own, e.g. with its process, and for an evaluation."""
        trial = work.trial if isinstance(work, Evaluation) else work
        path = self.trial(trial) / "result.json"
        result = self.result(trial)
        if not result:
            make_folder(path.parent)
            failed = {"schema": 1, "status": "failed", "arm": trial.arm.name, "seed": trial.seed}
            write_json(path, {**failed, "metrics": {}, "message": reason})
        elif result["status"] != "failed":
            write_json(path.parent / f"{split}.json", {**self.found(trial, split), "failed": reason})

    def known(self) -> dict[str, Any] | None:
        """What study.json holds, its settings at the least; None without one."""
        return read_json(self.settings_file, "settings")

    def facts(self) -> dict[str, Any]:
        """What study.json holds: the settings, and all that is known before the first trial. UserError without one."""
        needed = ("settings", "created", "command", "metric", "base", "arms", "data", "environment")
        facts: dict[str, Any] | None = read_json(self.settings_file, *needed)
        if facts is None:
            raise UserError(
                f"There is no study in {self.path}: it has no study.json. Give the folder that --out named."
            )
        check_plugins(facts.get("plugins", ()), str(self.path))
        return facts

    def check_same_study(self, settings: Mapping[str, Any]) -> None:
        """UserError, showing each difference, if the folder holds a study that these settings do not continue."""
        facts = self.known()
        try:
            changed = differences(facts["settings"], settings) if facts else []
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.settings_file} is damaged ({error!r}). Choose another folder with --out."
            ) from error
        if changed:
            raise UserError(
                f"{self.path} holds a study with other settings: {'; '.join(changed)}. Repeat the old ones to go on "
                "with it, or choose another folder with --out. Arms, seeds and values to tune may be added."
            )

    def refuse_study(self) -> None:
        """UserError if the folder is a study's: a single trial would lie between its files."""
        if self.settings_file.exists():
            raise UserError(f"{self.path} holds a study. Choose another folder for a single trial with --out.")

    def refuse_trial(self) -> None:
        """UserError if the folder is a single trial's, as `vitmods train` leaves it."""
        if (self.path / "config.json").exists() and not self.settings_file.exists():
            raise UserError(f"{self.path} holds a single trial. Choose another folder for a study with --out.")

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the folder against a second run; yields the descriptor that worker processes inherit.

        The kernel frees the lock when the last process that holds the descriptor is gone, so a killed run never
        leaves a stale lock, and a new run cannot start beside workers of a killed one that still write.
        """
        path = self.path / ".lock"
        make_folder(self.path)
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> None:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        patience = 0.0 if _alive(holder) else ORPHAN_GRACE_S
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    who = f" (process {holder})" if holder else ""
                    raise UserError(
                        f"Another run is at work in {self.path}{who}. Wait for it or end it, then run the same command."
                    ) from None
                time.sleep(0.1)


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
