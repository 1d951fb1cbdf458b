"""Images: from a folder or a named set to augmented batches that any run can repeat exactly."""

from vitmods.data.batch import Batch
from vitmods.data.dataset import ImageDataset, Split
from vitmods.data.load import Checked, check, load
from vitmods.data.splits import SplitOptions

__all__ = ["Batch", "Checked", "ImageDataset", "Split", "SplitOptions", "check", "load"]
