from .answer import Answer as Answer
from .arms import Arm as Arm
from .measure import Measure as Measure
from .study import Study as Study
