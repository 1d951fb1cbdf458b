"""Sets of torchvision's that several tests need, as their files lie on the disk."""

import json

from ..support import encoded, noise, write_files

PNG = encoded(noise(0))


def eurosat(root, count):
    """No splits; labels in `targets`."""
    files = {f"{name}/{i}.jpg": PNG for name in ("Forest", "River") for i in range(count)}
    write_files(root / "eurosat" / "2750", files)


def clevr(root, train, val):
    """Scenes of 3 to 10 things, split="train" / "val" / "test"; the labels of test are not public."""
    for split, count in (("train", train), ("val", val), ("test", 1)):
        names = [f"CLEVR_{split}_{i:06d}.png" for i in range(count)]
        scenes = [{"image_filename": name, "objects": [0] * (3 + i % 8)} for i, name in enumerate(names)]
        files = {f"images/{split}/{name}": PNG for name in names}
        if split != "test":
            files[f"scenes/CLEVR_{split}_scenes.json"] = json.dumps({"scenes": scenes})
        write_files(root / "clevr" / "CLEVR_v1.0", files)
