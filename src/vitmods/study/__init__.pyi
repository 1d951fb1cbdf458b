from .arms import Arm as Arm
from .result import StudyResult as StudyResult
from .study import Study as Study
