"""Training one trial: the loop, its checkpoints and its folder."""

from vitmods.train.distributed import Processes, join
from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import TrialRun
from vitmods.train.options import RunOptions
from vitmods.train.trial import train_trial

__all__ = ["Interrupted", "Processes", "RunOptions", "TrialRun", "join", "train_trial"]
