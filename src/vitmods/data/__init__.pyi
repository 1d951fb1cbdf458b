from .batch import Batch as Batch
from .dataset import ImageDataset as ImageDataset
from .dataset import Split as Split
from .loading import Checked as Checked
from .loading import check as check
from .loading import load as load
from .splits import SplitOptions as SplitOptions
