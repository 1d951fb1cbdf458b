from .answer import Answer as Answer
from .arms import Arm as Arm
from .arms import Replace as Replace
from .arms import parse_edits as parse_edits
from .checkpoints import open_trial as open_trial
from .executors import StudyOptions as StudyOptions
from .plan import Measure as Measure
from .study import Study as Study
