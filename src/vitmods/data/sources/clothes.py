"""Photos that come with the package: real images and three classes, for a first study without a download."""

from pathlib import Path

import numpy as np

from vitmods.data.read import decode
from vitmods.data.records import Records, Source
from vitmods.data.sources import Spec, data_source
from vitmods.util.limits import read_bytes

FOLDER = Path(__file__).parent / "clothes_32px"  # its README says where they come from
COUNTS = {"pants": 559, "shoes": 297, "t-shirt": 928}
SIDE = 32


@data_source("clothes", "clothes", "1,784 photos of pants, shoes and T-shirts, 32 x 32, no download")
def clothes(spec: Spec) -> Source:
    """All of them (Grigorev, "clothing dataset", CC0) as train, for splits to be made of.

    The file of a class is one sheet of photos, row by row.
    """
    ids: list[str] = []
    photos = []
    for name, count in COUNTS.items():
        sheet = decode(read_bytes(FOLDER / f"{name}.jpg", "image"), 3).transpose(1, 2, 0)
        rows = sheet.reshape(-1, SIDE, sheet.shape[1] // SIDE, SIDE, 3).swapaxes(1, 2)
        photos.append(rows.reshape(-1, SIDE, SIDE, 3)[:count])
        ids += [f"{name}/{i:04d}" for i in range(count)]
    pixels, stamps = np.concatenate(photos), tuple(f"clothes 1 {photo}" for photo in ids)
    labels = np.repeat(np.arange(len(COUNTS)), [*COUNTS.values()])
    records = Records(tuple(ids), labels, stamps, lambda key: pixels[key], np.arange(len(ids)))
    return Source("clothes", tuple(COUNTS), {"train": records})
