"""Images: from a folder or a named set to augmented batches that any run can repeat exactly."""

from vitmods.data.batch import Batch
from vitmods.data.dataset import ImageDataset, Split
from vitmods.data.load import Checked, check, load, load_sequences
from vitmods.data.sequences import SequenceDataset
from vitmods.data.splits import SplitOptions

__all__ = [
    "Batch",
    "Checked",
    "ImageDataset",
    "SequenceDataset",
    "Split",
    "SplitOptions",
    "check",
    "load",
    "load_sequences",
]
