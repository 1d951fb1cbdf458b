"""How a study is run on this machine: where, how many trials at a time, and what is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from vitmods.study.executors import HERE, ClusterOptions
from vitmods.study.executors.processes import visible_gpus
from vitmods.study.weights import Keep
from vitmods.train.device import check_tf32, place, resolve
from vitmods.train.loggers import check_loggers
from vitmods.train.options import WAYS, check_ways
from vitmods.train.record import check_recorded
from vitmods.util.errors import UserError

MOST_WORKERS = 8  # by default; beyond that a machine's memory bandwidth is the limit
MOST_ON_CLUSTER = 32  # jobs of Slurm; Ray says itself what there is room for
MOST_ON_GPU = 4  # trials; beyond that they wait for each other


@dataclass(frozen=True)
class Running:
    """How a study is run on this machine; `Study.run` explains each. Nothing here is part of the study."""

    workers: int | None = None
    device: str = "auto"
    data_workers: int | None = None
    checkpoint_minutes: float = 5.0
    cost_seconds: float = 30.0
    progress: bool = True
    cache_dir: str | Path | None = None
    recompute: bool = False
    checkpointing: bool = False
    tf32: bool = False
    compile: bool = False
    record: tuple[str, ...] = ()
    keep_weights: Keep = "all"
    cluster: ClusterOptions = HERE
    log: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", str(self.cache_dir))  # workers get it as JSON
        object.__setattr__(self, "log", check_loggers(self.log))
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers must be at least 1, not {self.workers}.")
        for name in ("data_workers", "checkpoint_minutes", "cost_seconds"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}.")
        check_recorded(self.record)
        if self.keep_weights not in get_args(Keep):
            raise UserError(f"keep_weights is {', '.join(get_args(Keep))}, not {self.keep_weights!r}.")
        check_ways(**{way: getattr(self, way) for way in WAYS})
        if self.tf32:
            check_tf32(self.torch_device)
        if self.device not in ("auto", "cpu"):
            place(self.device)  # a UserError where there is no such device, before any work

    @property
    def torch_device(self) -> torch.device:
        return resolve(self.device)

    def of_trials(self) -> dict[str, Any]:
        """How each trial runs, in a worker process too."""
        names = ("data_workers", "checkpoint_minutes", "cache_dir", "log", "record")
        return {**{name: getattr(self, name) for name in names}, "ways": [way for way in WAYS if getattr(self, way)]}

    @property
    def _gpus(self) -> range | list[int]:
        return range(len(visible_gpus())) if self.device in ("auto", "cuda") else [self.torch_device.index or 0]

    @property
    def devices(self) -> int:
        """Trials at a time that do not slow each other down: one a GPU, and as many as there are on a CPU."""
        return max(1, len(self._gpus)) if self.torch_device.type == "cuda" else MOST_WORKERS

    def workers_for(self, trials: int, trial_bytes: int) -> int:
        """Trials at a time: as asked for, or as many as fit the GPUs, or as cores and memory allow."""
        if self.workers is not None:
            return max(1, min(self.workers, trials))
        if self.cluster.executor != "here":
            return max(1, min(MOST_ON_CLUSTER, trials))
        if self.torch_device.type == "cuda":
            fitting = min(map(_free_gpu_bytes, self._gpus), default=0) // 2 // trial_bytes
            on_each = max(1, min(fitting, MOST_ON_GPU, torch.get_num_threads() // self.devices))
            return max(1, min(self.devices * on_each, trials))
        fitting = _memory_bytes() // 2 // trial_bytes
        return max(1, min(torch.get_num_threads(), MOST_WORKERS, fitting, trials))


def _free_gpu_bytes(index: int) -> int:
    return torch.cuda.mem_get_info(index)[0]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
