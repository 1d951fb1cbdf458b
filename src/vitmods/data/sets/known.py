"""KNOWN: what each published set is, how many images it has, and which files to put where."""

from dataclasses import dataclass, field
from pathlib import Path

from vitmods.data.records import Source, printable
from vitmods.util.errors import UserError


@dataclass(frozen=True)
class Known:
    """usage: the spec. counts: images of each split as published. layout: what the files are called below the folder,
    one way a line. origin: who gives them. used_in: tables of the papers. terms: conditions of use that are stated."""

    title: str
    usage: str
    classes: int
    counts: dict[str, int]
    layout: tuple[str, ...]
    origin: str
    used_in: str
    terms: str = "see its authors"
    notes: tuple[str, ...] = field(default=())

    def missing(self, root: Path, reason: str) -> UserError:
        """The error that says which files to put where."""
        where = printable(str(root))
        ways = "\n".join(f"  {where}/{line}" for line in self.layout)
        one_of = "one of these lines" if len(self.layout) > 1 else "this"
        return UserError(
            f"{self.title} was not found in {where}: {reason.rstrip('.')}.\nPut there {one_of}:\n{ways}\n"
            f"The files come from {self.origin}. Nothing is downloaded unless asked for."
        )


def count_warnings(known: Known, source: Source) -> list[str]:
    """Where the images found are not as many as were published."""
    found = {name: len(records) for name, records in source.splits.items()}
    return [
        f"{name} has {found[name]:,} images; {known.title} as published has {count:,}."
        for name, count in known.counts.items()
        if name in found and found[name] != count
    ]


_FREE = "non-commercial research and education"
_3T = "Three Things, Table 6"
_IMAGENET = "image-net.org (ILSVRC 2012; needs an account)"
_TORCHVISION = "its authors; torchvision fetches it with ?download=1"

KNOWN: dict[str, Known] = {
    "imagenet": Known(
        "ImageNet-1k",
        "imagenet:FOLDER",
        1000,
        {"train": 1_281_167, "val": 50_000},
        (
            "train/n01440764/*.JPEG and val/n01440764/*.JPEG, 1,000 folders each",
            "val/ILSVRC2012_val_00000001.JPEG, ... with ILSVRC2012_devkit_t12.tar.gz or a list of labels beside val",
            "ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz as they come",
            "ILSVRC/Data/CLS-LOC/train and val, with LOC_val_solution.csv (Kaggle)",
            "data/train-*.parquet and validation-*.parquet (Hugging Face)",
        ),
        _IMAGENET,
        "Dual PatchNorm, Tables 1, 2, 4, 6; DTN, Tables 1-3, 5, 7-10, 12; Three Things, Tables 1-3, 5, 7",
        _FREE,
    ),
    "imagenet-v2": Known(
        "ImageNet-V2",
        "imagenet-v2:FOLDER",
        1000,
        {"test": 10_000},
        ("imagenetv2-matched-frequency-format-val/0/*.jpeg to 999/*.jpeg (and the other two variants' folders)",),
        "Recht et al. 2019 (huggingface.co/datasets/vaishaal/ImageNetV2)",
        "Three Things, Tables 1-3, 5, 7",
        "MIT",
    ),
    "imagenet-r": Known(
        "ImageNet-R",
        "imagenet-r:FOLDER",
        200,
        {"test": 30_000},
        ("imagenet-r/n01443537/*.jpg, 200 folders",),
        "Hendrycks et al. 2021 (github.com/hendrycks/imagenet-r)",
        "DTN, appendix B.2",
    ),
    "imagenet-c": Known(
        "ImageNet-C",
        "imagenet-c:FOLDER?corruption=fog&severity=3",
        1000,
        {"test": 50_000},
        (
            "fog/3/n01440764/*.JPEG, for each corruption and severities 1 to 5",
            "weather/fog/3/n01440764/*.JPEG, below the names of the five archives",
        ),
        "Hendrycks and Dietterich 2019 (zenodo.org, record 2235448)",
        "DTN, Table 6",
        "CC BY 4.0",
    ),
    "imagenet-real": Known(
        "ImageNet-ReaL",
        "imagenet-real:FOLDER",
        1000,
        {"test": 46_837},
        (
            "val in any layout of imagenet; the labels come with timm",
            "val in any layout of imagenet, and real.json with the labels",
        ),
        f"{_IMAGENET}; the labels from Beyer et al. 2020 (github.com/google-research/reassessed-imagenet)",
        "none; labels without the known errors of ImageNet's",
        "labels: Apache-2.0",
    ),
    "cifar10": Known(
        "CIFAR-10",
        "cifar10:FOLDER",
        10,
        {"train": 50_000, "test": 10_000},
        ("cifar-10-batches-py/data_batch_1, ..., test_batch, batches.meta",),
        "Krizhevsky 2009, cs.toronto.edu; torchvision fetches it with ?download=1",
        _3T,
    ),
    "cifar100": Known(
        "CIFAR-100",
        "cifar100:FOLDER",
        100,
        {"train": 50_000, "test": 10_000},
        ("cifar-100-python/train, test, meta",),
        "Krizhevsky 2009, cs.toronto.edu; torchvision fetches it with ?download=1",
        f"{_3T}; VTAB in Dual PatchNorm, Table 3",
    ),
    "cars": Known(
        "Stanford Cars",
        "cars:FOLDER",
        196,
        {"train": 8_144, "test": 8_041},
        (
            "stanford_cars/cars_train/*.jpg, cars_test/*.jpg, devkit/cars_train_annos.mat, devkit/cars_meta.mat and "
            "cars_test_annos_withlabels.mat",
        ),
        "Krause et al. 2013; the authors' page is gone, copies are on Kaggle and Hugging Face",
        _3T,
    ),
    "flowers102": Known(
        "Oxford Flowers-102",
        "flowers102:FOLDER",
        102,
        {"train": 2_040, "test": 6_149},
        ("flowers-102/jpg/image_00001.jpg, ..., imagelabels.mat and setid.mat",),
        "Nilsback and Zisserman 2008, robots.ox.ac.uk; torchvision fetches it with ?download=1",
        f"{_3T}; VTAB in Dual PatchNorm, Table 3",
        notes=("train is the published train and val together, 1,020 each, as in the transfer tables",),
    ),
    "pets": Known(
        "Oxford-IIIT Pets",
        "pets:FOLDER",
        37,
        {"train": 3_680, "test": 3_669},
        ("oxford-iiit-pet/images/*.jpg and annotations/trainval.txt, test.txt",),
        "Parkhi et al. 2012, robots.ox.ac.uk; torchvision fetches it with ?download=1",
        "VTAB in Dual PatchNorm, Table 3",
        "CC BY-SA 4.0",
        notes=("train is the published trainval",),
    ),
    "food101": Known(
        "Food-101",
        "food101:FOLDER",
        101,
        {"train": 75_750, "test": 25_250},
        ("food-101/images/*/*.jpg and meta/train.json, test.json",),
        _TORCHVISION,
        "none; a usual transfer set",
    ),
    "dtd": Known(
        "Describable Textures",
        "dtd:FOLDER",
        47,
        {"train": 1_880, "val": 1_880, "test": 1_880},
        ("dtd/dtd/images/*/*.jpg and labels/train1.txt, val1.txt, test1.txt",),
        _TORCHVISION,
        "VTAB in Dual PatchNorm, Table 3",
        notes=("the first of its ten partitions",),
    ),
    "sun397": Known(
        "SUN397",
        "sun397:FOLDER",
        397,
        {},
        ("SUN397/a/abbey/sun_*.jpg, ... and SUN397/ClassName.txt",),
        _TORCHVISION,
        "Dual PatchNorm, Tables 3 and 7",
        notes=(
            "with the lists of TensorFlow Datasets in FOLDER, sun397_tfds_tr.txt, sun397_tfds_va.txt and "
            "sun397_tfds_te.txt: their splits (76,128, 10,875 and 21,750)",
            "with partition=1 (to 10): SUN397/Partitions/Training_01.txt and Testing_01.txt (19,850 each)",
            "otherwise train, val and test are made, class by class, from split_seed",
        ),
    ),
    "inat2018": Known(
        "iNaturalist 2018",
        "inat2018:FOLDER",
        8_142,
        {"train": 437_513, "test": 24_426},
        ("train_val2018/*/*/*.jpg, train2018.json and val2018.json",),
        "github.com/visipedia/inat_comp",
        _3T,
        _FREE,
        notes=("test is the published val, on which the papers report; the published test has no labels",),
    ),
    "inat2019": Known(
        "iNaturalist 2019",
        "inat2019:FOLDER",
        1_010,
        {"train": 265_213, "test": 3_030},
        ("train_val2019/*/*/*.jpg, train2019.json and val2019.json",),
        "github.com/visipedia/inat_comp",
        _3T,
        _FREE,
        notes=("test is the published val, on which the papers report; the published test has no labels",),
    ),
    "vtab": Known(
        "VTAB-1k",
        "vtab:TASK?root=FOLDER",
        0,
        {"train": 800, "val": 200},
        (
            "FOLDER-OF-TASK/train800.txt, val200.txt and test.txt, lines of path and class number, as the usual copies "
            "of VTAB-1k have them",
            "TASK/train/CLASS/*.jpg and TASK/test/CLASS/*.jpg (and val), from which 800 and 200 are drawn",
            "the files of torchvision's set, for the tasks that it has",
        ),
        "Zhai et al. 2019 (github.com/google-research/task_adaptation)",
        "Dual PatchNorm, Table 3",
    ),
}
