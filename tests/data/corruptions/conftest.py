"""The plain forms and the test images as fixtures, since test folders are no packages; textures for frost."""

import importlib.util
from pathlib import Path

import pytest


def _module(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plain():
    return _module("plain_corruptions")


@pytest.fixture(scope="session")
def made():
    return _module("corruption_images")


@pytest.fixture(scope="session")
def textures(made, tmp_path_factory):
    """A folder with made-up frost textures."""
    folder = tmp_path_factory.mktemp("frost")
    made.write_textures(folder)
    return folder
