from .answer import Answer as Answer
from .arms import Arm as Arm
from .edits import Replace as Replace
from .edits import parse_edits as parse_edits
from .measure import Measure as Measure
from .start import open_trial as open_trial
from .study import Study as Study
