"""Makes the module with the made-up study's answer a fixture, since test folders are no packages."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    spec = importlib.util.spec_from_file_location("synthetic_study", Path(__file__).with_name("synthetic.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
