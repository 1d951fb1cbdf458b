from .arms import Arm as Arm
from .edits import Replace as Replace
from .edits import parse_edits as parse_edits
from .result import StudyResult as StudyResult
from .study import Study as Study
