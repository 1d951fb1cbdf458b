"""`make test-minimum` tests the lowest versions that pyproject.toml allows."""

import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_pins_are_the_lower_bounds():
    spec = importlib.util.spec_from_file_location("minimum", ROOT / "benchmarks/minimum.py")
    minimum = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimum)
    assert (ROOT / "requirements-minimum.txt").read_text() == minimum.pins(), "run make minimum-lock"


def test_every_dependency_of_dev_that_users_have_too_has_the_same_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = {line.partition(">=")[0]: line for name, part in extras.items() if name != "dev" for line in part}
    users |= {line.partition(">=")[0]: line for line in project["dependencies"]}
    for line in extras["dev"]:
        assert users.get(line.partition(">=")[0], line) == line
