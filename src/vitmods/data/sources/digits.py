"""scikit-learn's 1,797 handwritten digits, 8 x 8 gray (Alpaydin and Kaynak, UCI 1998)."""

import numpy as np

from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source


@data_source("digits", "digits", "scikit-learn's 1,797 handwritten digits, 8 x 8 gray, no download")
def digits(spec: Spec) -> Source:
    """All of them as train, for splits to be made of."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    n = len(pixels)
    ids = tuple(f"{i:04d}" for i in range(n))
    records = Records(ids, bunch.target.astype(np.int64), ids, lambda key: pixels[key], np.arange(n))
    return Source("digits", tuple(str(name) for name in bunch.target_names), {"train": records})
