"""Golden vectors, as in tests/papers."""

from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def golden():
    with np.load(GOLDEN / "mean_attention_distance.npz", allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files}
