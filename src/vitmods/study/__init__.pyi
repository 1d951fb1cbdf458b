from .answer import Answer as Answer
from .arms import Arm as Arm
from .study import Study as Study
