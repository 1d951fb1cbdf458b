from .base import TASKS as TASKS
from .base import Measured as Measured
from .base import Task as Task
from .base import TaskModel as TaskModel
from .classification import Classification as Classification
from .metrics import Metric as Metric
from .multilabel import MultiLabel as MultiLabel
from .sequence_classification import SequenceClassification as SequenceClassification
