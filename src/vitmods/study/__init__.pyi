from .arms import Arm as Arm
from .answer import Answer as Answer
from .study import Study as Study
