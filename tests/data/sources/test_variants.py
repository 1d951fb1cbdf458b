"""ImageNet-V2, R, C and ReaL: evaluation sets whose labels are those of the 1,000 classes."""

import json
import pkgutil

import pytest
from timm.data import RealLabelsImagenet

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.papers.sources.imagenet import ARCHIVES, V2_VARIANTS, corruption_specs, titles, wnids
from vitmods.recipes import Augment
from vitmods.util.errors import UserError

AUGMENT = Augment(crop="none", flip=0.0, eval_crop=1.0)


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


@pytest.mark.parametrize("variant", V2_VARIANTS)
def test_v2_goes_by_numbers_not_by_names(tmp_path, write_files, variant):
    folder = tmp_path / f"imagenetv2-{variant}-format-val"
    write_files(folder, {f"{i}/{i:03d}.jpeg": b"" for i in range(1000)})
    for root, options in ((tmp_path, f"?variant={variant}"), (folder, "")):
        source = open_source(f"imagenet-v2:{root}{options}")
        records = source.splits["test"]
        assert [int(name.split("/")[-1][:3]) for name in records.ids] == records.labels.tolist()
        assert (list(source.splits), source.class_map, source.classes) == (["test"], None, titles())
        assert source.name == f"ImageNet-V2 {variant}"
    assert source.warnings == ["test has 1,000 images; ImageNet-V2 as published has 10,000."]


def test_v2_takes_matched_frequency_unless_reported(tmp_path, write_files):
    for i, variant in enumerate(V2_VARIANTS):
        write_files(tmp_path / f"imagenetv2-{variant}-format-val", {f"0/{n}.jpeg": b"" for n in range(i + 1)})
    assert len(open_source(f"imagenet-v2:{tmp_path}").splits["test"]) == 1
    assert len(open_source(f"imagenet-v2:{tmp_path}?variant=top-images").splits["test"]) == 3


@pytest.mark.parametrize("inner", ["", "imagenet-r"])
def test_r_maps_its_classes_to_the_thousand(tmp_path, write_files, jpeg, inner):
    indices = pkgutil.get_data("timm.data", "_info/imagenet_r_indices.txt").decode().split()
    two_hundred = tuple(map(int, indices))
    write_files(tmp_path / inner, {f"{wnids()[c]}/art_{c}.jpg": jpeg(c) for c in two_hundred})
    write_files(tmp_path / inner, {"README.txt": b""})
    dataset = data.load(f"imagenet-r:{tmp_path}", img_size=8, augment=AUGMENT)
    assert dataset.class_map == two_hundred
    assert dataset.classes == tuple(titles()[c] for c in two_hundred)
    test = dataset.splits["test"]
    assert [f"art_{dataset.class_map[label]}.jpg" for label in test.labels] == [n.split("/")[-1] for n in test.ids]
    assert dataset.summary()["class_map"] == list(two_hundred)


@pytest.fixture
def corrupted(tmp_path, write_files):
    """ImageNet-C with one image a folder; half of its archives unpacked with their names, half without."""
    for archive, names in ARCHIVES.items():
        base = archive if archive in ("noise", "extra") else ""
        write_files(tmp_path / base, {f"{n}/{s}/{wnids()[7]}/{n}_{s}.JPEG": b"" for n in names for s in range(1, 6)})
    return tmp_path


def test_c_has_75_parts_and_20_more_and_must_be_whole(corrupted, tmp_path):
    specs = list(corruption_specs(corrupted))
    assert len({spec for _, _, spec in specs}) == 75
    assert len(list(corruption_specs(str(corrupted), extra=True))) == 95
    for name, severity, spec in specs:
        source = open_source(spec)
        assert source.splits["test"].ids[0].endswith(f"{name}/{severity}/{wnids()[7]}/{name}_{severity}.JPEG")
        assert source.class_map == (7,)
        assert source.name == f"ImageNet-C {name} {severity}"
    (corrupted / "fog" / "3").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"these folders are missing: fog/3\.") as caught:
        corruption_specs(corrupted)
    assert "weather/fog/3/n01440764" in str(caught.value)
    with pytest.raises(UserError, match="the folder fog/3 is missing"):
        open_source(f"imagenet-c:{corrupted}?corruption=fog&severity=3")


def test_the_corruptions_are_those_that_can_be_generated():
    corruptions = pytest.importorskip("vitmods.papers.corruptions")
    fifteen = [name for archive, group in ARCHIVES.items() if archive != "extra" for name in group]
    assert (tuple(fifteen), ARCHIVES["extra"]) == (corruptions.CORRUPTIONS, corruptions.EXTRA)


LABELS = [[3], [], [3, 8], [999], [8]]


@pytest.fixture
def real(tmp_path, write_files, jpeg):
    """Five validation images, of which ImageNet says that they are of classes 3, 3, 3, 8, 8."""
    files = {f"val/{wnids()[c]}/{val_name(i)}": jpeg(i) for i, c in enumerate((3, 3, 3, 8, 8), 1)}
    write_files(tmp_path, files)
    return tmp_path


def test_real_labels_follow_the_numbers_of_the_files(real):
    (real / "real.json").write_text(json.dumps(LABELS))
    dataset = data.load(f"imagenet-real:{real}", img_size=8, augment=AUGMENT)
    test = dataset.splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [val_name(i) for i in (1, 3, 4, 5)]
    assert test.label_sets == ((3,), (3, 8), (999,), (8,))
    assert test.labels.tolist() == [3, 3, 8, 8]
    assert (dataset.class_map, dataset.num_classes) == (None, 1000)
    summary = dataset.summary()
    assert summary["label_sets"] == ["test"]
    assert any("1 images without a ReaL label are left out" in text for text in summary["warnings"])
    (real / "other.json").write_text(json.dumps([[3], [], [3], [999], [8]]))
    other = data.load(f"imagenet-real:{real}?labels={real / 'other.json'}", img_size=8, augment=AUGMENT)
    assert other.summary()["fingerprint"] != summary["fingerprint"]


def test_real_labels_stay_with_their_images_when_some_cannot_be_read(real):
    (real / "real.json").write_text(json.dumps(LABELS))
    (real / "val" / wnids()[3] / val_name(1)).write_bytes(b"")
    dataset = data.load(f"imagenet-real:{real}", img_size=8, augment=AUGMENT, unreadable="skip")
    assert dataset.splits["test"].label_sets == ((3, 8), (999,), (8,))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("imagenet-v2:{root}", "the class folder 0 is missing in .*\n.*Put there"),
        ("imagenet-v2:{root}?variant=top-images", "the folder imagenetv2-top-images-format-val is missing"),
        (
            "imagenet-v2:{root}?variant=top-image",
            "Unknown variant \"top-image\" of ImageNet-V2. Did you mean 'top-images'",
        ),
        ("imagenet-r:{root}", "class folders such as n01443537 are missing"),
        ("imagenet-r:{root}?variant=a", 'unknown option "variant" of imagenet-r. It takes none'),
        ("imagenet-c:{root}", "needs a corruption"),
        ("imagenet-c:{root}?corruption=fogg&severity=1", "Did you mean 'fog'"),
        ("imagenet-c:{root}?corruption=fog&severity=6", 'severity from 1 to 5, not "6"'),
        ("imagenet-c:{root}?corruption=fog&severity=1", "the folder fog/1 is missing"),
        ("imagenet-real:{root}", "the validation images are missing"),
        ("imagenet-real:{root}/..?labels=none.json", "the validation images are missing"),
        ("imagenet-r:{root}/none", "the folder does not exist"),
        ("imagenet:", "does not say where the images are: write imagenet:FOLDER"),
    ],
)
def test_specs_of_what_is_not_there(tmp_path, spec, message):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        open_source(spec.format(root=tmp_path / "a" / "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1], 2]", "not a JSON list of lists"),
        ("{", "not a JSON list of lists"),
        ("[[1000]]", "outside 0 to 999"),
        ("[[1]]", "4 validation images are not called"),
    ],
)
def test_label_files_that_are_not_reals(real, content, message):
    (real / "real.json").write_text(content)
    with pytest.raises(UserError, match=message):
        open_source(f"imagenet-real:{real}")


def test_real_labels_come_with_timm_too(real):
    with pytest.raises(UserError, match=r"nothing\.json does not exist"):
        open_source(f"imagenet-real:{real}?labels=nothing.json")
    names = [val_name(i) for i in range(1, 50_001)]
    reference = RealLabelsImagenet(names).real_labels
    test = open_source(f"imagenet-real:{real}").splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [name for name in names[:5] if reference[name]]
    assert [list(labels) for labels in test.label_sets] == [reference[name] for name in names[:5] if reference[name]]
