"""`pip install vitmods` without extras: the wheel, in an environment that has what it depends on and nothing else."""

import os
import subprocess
import sys
from importlib.metadata import PathDistribution, distribution, distributions
from pathlib import Path
from zipfile import Path as InZip

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def run(*command, cwd=ROOT):
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(package, extras=("",), found=None):
    """The distributions that a package needs here, and those that they need."""
    found = {} if found is None else found
    for requirement in map(Requirement, package.requires or ()):
        name = canonicalize_name(requirement.name)
        markers = [{"extra": extra} for extra in extras]
        is_needed = requirement.marker is None or any(map(requirement.marker.evaluate, markers))
        if is_needed and not {"", *requirement.extras} <= found.get(name, set()):
            found[name] = {"", *requirement.extras} | found.get(name, set())
            required(distribution(name), found[name], found)
    return found


def link(source, target, ours, others):
    """Link the files of some distributions, by the parts of their paths; folders that no others use as a whole."""
    shared = {path[0] for path in others}
    for name in {path[0] for path in ours}:
        inner = {path[1:] for path in ours if path[0] == name} - {()}
        if inner and name in shared:
            (target / name).mkdir()
            link(source / name, target / name, inner, {path[1:] for path in others if path[0] == name} - {()})
        else:
            (target / name).symlink_to(source / name)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment's folder of programs, and the names of what the wheel needs, which is in it."""
    folder = tmp_path_factory.mktemp("install")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder / "wheel")
    (wheel,) = (folder / "wheel").iterdir()
    (metadata,) = (path for path in InZip(wheel).iterdir() if path.name.endswith(".dist-info"))
    needed, ours, others = required(PathDistribution(metadata)), set(), set()
    for package in distributions():
        files = {path.parts for path in package.files or () if path.parts[0] not in ("..", "__pycache__")}
        (ours if canonicalize_name(package.name) in needed else others).update(files)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    (target,) = (folder / "env").glob("lib/python*/site-packages")
    link(Path(distribution("torch").locate_file("")), target, ours, others)
    pip = [sys.executable, "-m", "pip", "--python", folder / "env"]
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    assert "No broken requirements" in run(*pip, "check")
    return folder / "env" / "bin", set(needed)


def test_the_package_works_with_its_dependencies_alone(installed, tmp_path):
    programs, needed = installed
    script = "from importlib.metadata import distributions; print(*(package.name for package in distributions()))"
    assert set(map(canonicalize_name, run(programs / "python", "-c", script).split())) == {*needed, "vitmods"}
    assert not {"pytest", "hypothesis", "ray", "transformers", "torchmetrics", "onnx"} & needed
    assert "usage: vitmods COMMAND" in run(programs / "vitmods", "--help", cwd=tmp_path)
    study = "compare --base mu1/2 --arms dpn --seeds 1 --steps 2 --device cpu --workers 1 --cost-seconds 0 --out study"
    assert "Report: study/report.html" in run(programs / "vitmods", *study.split(), cwd=tmp_path)
    assert (tmp_path / "study" / "report.html").exists()
