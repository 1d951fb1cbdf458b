"""ImageNet-V2, R, C and ReaL: evaluation sets whose labels are those of the 1,000 classes."""

import json
import pkgutil

import pytest
from timm.data import RealLabelsImagenet

from vitmods.data.sources import open_source
from vitmods.papers.sources.imagenet import ARCHIVES, V2_VARIANTS, corruption_specs, titles, wnids
from vitmods.util.errors import UserError

from ..support import encoded, load, noise, write_files


def val_name(number):
    return f"ILSVRC2012_val_{number:08d}.JPEG"


@pytest.mark.parametrize("variant", V2_VARIANTS)
def test_v2_goes_by_numbers_not_by_names(tmp_path, variant):
    folder = tmp_path / f"imagenetv2-{variant}-format-val"
    write_files(folder, {f"{i}/{i:03d}.jpeg": b"" for i in range(1000)})
    for root, options in ((tmp_path, f"?variant={variant}"), (folder, "")):
        source = open_source(f"imagenet-v2:{root}{options}")
        records = source.splits["test"]
        assert [int(name.split("/")[-1][:3]) for name in records.ids] == records.labels.tolist()
        assert (list(source.splits), source.class_map, source.classes) == (["test"], None, titles())
        assert source.name == f"ImageNet-V2 {variant}"
    assert source.warnings == ["test has 1,000 images; ImageNet-V2 as published has 10,000."]


def test_v2_is_matched_frequency_unless_named(tmp_path):
    for i, variant in enumerate(V2_VARIANTS):
        write_files(tmp_path / f"imagenetv2-{variant}-format-val", [f"0/{n}.jpeg" for n in range(i + 1)])
    for options, count in (("", 1), ("?variant=top-images", 3)):
        assert len(open_source(f"imagenet-v2:{tmp_path}{options}").splits["test"]) == count


@pytest.mark.parametrize("inner", ["", "imagenet-r"])
def test_r_maps_its_classes_to_the_thousand(tmp_path, inner):
    indices = pkgutil.get_data("timm.data", "_info/imagenet_r_indices.txt").decode().split()
    two_hundred = tuple(map(int, indices))
    write_files(tmp_path / inner, {f"{wnids()[c]}/art_{c}.jpg": encoded(noise(c), "JPEG") for c in two_hundred})
    write_files(tmp_path / inner, {"README.txt": b""})
    dataset = load(f"imagenet-r:{tmp_path}")
    assert dataset.class_map == two_hundred
    assert dataset.classes == tuple(titles()[c] for c in two_hundred)
    test = dataset.splits["test"]
    assert [f"art_{dataset.class_map[label]}.jpg" for label in test.labels] == [n.split("/")[-1] for n in test.ids]
    assert dataset.summary()["class_map"] == list(two_hundred)


@pytest.fixture
def corrupted(tmp_path):
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
def real(tmp_path):
    """Five validation images, of which ImageNet says that they are of classes 3, 3, 3, 8, 8."""
    return write_files(
        tmp_path,
        {f"val/{wnids()[c]}/{val_name(i)}": encoded(noise(i), "JPEG") for i, c in enumerate((3, 3, 3, 8, 8), 1)},
    )


def test_real_labels_follow_the_numbers_of_the_files(real):
    (real / "real.json").write_text(json.dumps(LABELS))
    dataset = load(f"imagenet-real:{real}")
    test = dataset.splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [val_name(i) for i in (1, 3, 4, 5)]
    assert test.label_sets == ((3,), (3, 8), (999,), (8,))
    assert test.labels.tolist() == [3, 3, 8, 8]
    assert (dataset.class_map, dataset.num_classes) == (None, 1000)
    summary = dataset.summary()
    assert summary["label_sets"] == ["test"]
    assert any("1 images without a ReaL label are left out" in text for text in summary["warnings"])
    (real / "other.json").write_text(json.dumps([[3], [], [3], [999], [8]]))
    other = load(f"imagenet-real:{real}?labels={real / 'other.json'}")
    assert other.summary()["fingerprint"] != summary["fingerprint"]
    (real / "val" / wnids()[3] / val_name(1)).write_bytes(b"")
    dataset = load(f"imagenet-real:{real}", unreadable="skip")
    assert dataset.splits["test"].label_sets == ((3, 8), (999,), (8,))


def test_real_labels_come_with_timm_too(real):
    names = [val_name(i) for i in range(1, 50_001)]
    reference = RealLabelsImagenet(names).real_labels
    test = open_source(f"imagenet-real:{real}").splits["test"]
    assert [name.split("/")[-1] for name in test.ids] == [name for name in names[:5] if reference[name]]
    assert [list(labels) for labels in test.label_sets] == [reference[name] for name in names[:5] if reference[name]]
