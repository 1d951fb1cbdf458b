"""Images: from a folder or a named set to augmented batches that any run can repeat exactly."""

from vitmods.data.batch import Batch
from vitmods.data.check import Checked, check
from vitmods.data.dataset import ImageDataset, Split
from vitmods.data.load import load

__all__ = ["Batch", "Checked", "ImageDataset", "Split", "check", "load"]
