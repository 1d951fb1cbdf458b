"""The short form of `make fuzz`: hostile input gives a value or a UserError."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings

from vitmods import Recipe, ViTConfig
from vitmods.adapters import load
from vitmods.study.store import slug
from vitmods.util.errors import UserError

from .families import FAMILIES, READERS, VIT, files, raw_of, run

COUNTS = {"expressions": 60, "recipes": 40, "configs": 60, "files": 60, "models": 40}


def test_what_failed_once(tmp_path):
    for fields in ({"resize_range": []}, {"randaugment": []}, {"randaugment": [2, 9, 9]}, {"crop_scale": [10**400, 1]}):
        with pytest.raises(UserError):
            Recipe.from_dict({"augment": fields})
    with pytest.raises(UserError):
        ViTConfig.from_dict({**VIT, "mlp_dim": 10**400})
    assert slug("\ud800").startswith("arm-")
    (tmp_path / "f.pth").write_bytes(b"\x80\x02R.")  # a pickle that takes from an empty stack
    with pytest.raises(UserError, match=r"f\.pth cannot be read; it may be damaged"):
        load(tmp_path / "f.pth")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_or_a_user_error(family):
    unlimited = {"deadline": None, "database": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=COUNTS[family], **unlimited)
    @given(FAMILIES[family][0])
    def read(value):
        run(family, value)

    read()


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_not_spoiled_reaches_its_reader(name):
    """Three of them are refused all the same, for what they lack."""
    with pytest.raises(UserError) if name in ("manifest", "npz", "pth") else nullcontext():
        files((name, raw_of(READERS[name][1])))


def test_any_other_error_fails(monkeypatch):
    for error, fails in ((UserError, False), (KeyError, True), (RecursionError, True)):
        monkeypatch.setitem(FAMILIES, "expressions", (FAMILIES["expressions"][0], Mock(side_effect=error("x"))))
        with pytest.raises(error) if fails else nullcontext():
            run("expressions", "dpn")
