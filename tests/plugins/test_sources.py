"""A user's own source of data: one file, opened by its name as any other; test_plugins.py has a study that reads it."""

from pathlib import Path

import pytest

from vitmods import data
from vitmods.data.sources import open_source
from vitmods.recipes import plain
from vitmods.util.errors import UserError
from vitmods.util.registry import plugins

SOURCE = Path(__file__).with_name("my_source.py")


def test_without_the_plugin_there_is_no_such_source():
    with pytest.raises(UserError, match=r"Neither a folder .stripes:40. nor a set|folder stripes:40 does not exist"):
        open_source("stripes:40")


def test_a_source_from_outside_is_one_file(load):
    load(SOURCE.stem)
    assert str(SOURCE) in plugins()
    source = open_source("stripes:40?gray=150")
    assert (source.classes, len(source.splits["train"]), source.spec) == (("down", "across"), 40, "stripes:40?gray=150")
    with pytest.raises(UserError, match=r"unknown option .grey. of stripes\. Did you mean .gray."):
        open_source("stripes:40?grey=1")
    with pytest.raises(UserError, match="Did you mean 'stripes'"):
        open_source("stripe:40")


def test_images_may_have_targets_of_a_source_s_own(load):
    load("my_depth")
    options = {"img_size": 8, "in_chans": 1, "augment": plain().augment}
    dataset = data.load("walls:40", target="depth", **options)
    assert dataset.summary()["warnings"] == []
    batch = next(dataset.train_batches(seed=0, epoch=0, batch_size=8))
    assert [255 - one.annotation.meters for one in batch.targets] == pytest.approx(
        ((batch.inputs[:, 0, 0, 0] * 0.5 + 0.5) * 255).tolist(), abs=0.01
    )
    for target, reason in (("class", "not a class"), ("labels", "not labels")):
        with pytest.raises(UserError, match=f"gives a depth of each image, {reason}"):
            data.load("walls:40", target=target, **options)
