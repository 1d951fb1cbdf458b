"""Training one trial: the loop, its checkpoints and its folder."""

from vitmods.train.interrupt import Interrupted
from vitmods.train.loop import Throughput, TrialRun
from vitmods.train.trial import train_trial

__all__ = ["Interrupted", "Throughput", "TrialRun", "train_trial"]
