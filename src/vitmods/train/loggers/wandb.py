"""Weights & Biases: a run a trial, with its fields as config. WANDB_MODE, WANDB_ENTITY, WANDB_DIR and the like hold.

Offline, the files of a trial lie in `wandb/` of its folder, and `wandb sync` sends them. When a trial goes on, W&B
takes up its run; offline the newest of its folders has all rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vitmods.train.loggers import LOGGERS, LoggedRun, LoggerKind
from vitmods.util.errors import UserError


class Wandb:
    """A run of W&B."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        folder = os.environ.get("WANDB_DIR") or (run.folder and str(run.folder.resolve()))
        self._run: Any = wandb.init(
            project=run.study,
            id=run.key,
            name=run.name,
            group=run.group,
            job_type=run.kind,
            config={**run.fields, "config": dict(run.config)},
            allow_val_change=True,
            dir=folder,
            resume=None if _mode() == "offline" else "allow",  # offline it cannot be asked
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.resumed = bool(self._run.resumed)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self, status: str, scalars: Mapping[str, float]) -> None:
        self._run.summary.update({**scalars, "status": status})
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _mode() -> str:
    import wandb

    return str(wandb.setup().settings.mode)


def _check() -> None:
    """UserError where nobody is logged in: W&B would ask in the middle of the work."""
    import wandb

    if _mode() == "online" and not wandb.api.api_key:
        raise UserError(
            "W&B has no account here: run `wandb login`, or set WANDB_MODE=offline and send the runs later with "
            "`wandb sync`."
        )


LOGGERS.add("wandb", LoggerKind(Wandb, needs="wandb", check=_check))
