"""Small images and files, and what tests ask of a set."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

from vitmods import data
from vitmods.recipes import Augment

UNCHANGED = Augment(crop="none", flip=0.0, eval_crop=1.0)


def noise(seed, size=(12, 12)):
    """An image (H, W) that no other seed gives."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_files(root, files):
    """name -> bytes or text; names in a list, or separated by spaces, are empty files."""
    files = files.split() if isinstance(files, str) else files
    for name, content in (files if isinstance(files, dict) else dict.fromkeys(files, b"")).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def write_tar(path, members, mode="w"):
    """name -> bytes; a list of pairs may have a name twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def load(spec, **options):
    return data.load(str(spec), **{"img_size": 8, "augment": UNCHANGED, **options})


def counts(images):
    return {name: len(split) for name, split in images.splits.items()}


def by_sample(batches):
    """index -> bytes of the image; each comes once."""
    pairs = [(int(i), image.numpy().tobytes()) for b in batches for i, image in zip(b.index, b.inputs, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def images_of_shard(folder, shard):
    """Name, label, offset and size of each image of a packed shard, in the order of the shard."""
    splits = json.loads((folder / "manifest.json").read_text())["splits"].values()
    number = [entry["file"] for facts in splits for entry in facts["shards"]].index(shard)
    with np.load(folder / "index.npz") as index:
        names, rows = index["names"].tobytes().decode().split("\0"), index["rows"]
    columns = (rows[name].tolist() for name in ("label", "offset", "size"))
    images = zip(names, *columns, strict=True)
    return [image for image, in_shard in zip(images, rows["shard"] == number, strict=True) if in_shard]
