from .distributed import Processes as Processes
from .distributed import join as join
from .interrupt import Interrupted as Interrupted
from .loop import TrialRun as TrialRun
from .options import RunOptions as RunOptions
from .trial import train_trial as train_trial
