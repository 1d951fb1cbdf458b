"""Every example runs as its page says, and ends with what it promises."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitmods as vm

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, short_clocks):
    """Runs an example as a script in an empty folder, with all trials or the first ones in this process, and `fewer`
    images or seeds; what it printed."""

    def script(name: str, *arguments: str, trials: int | None = None, **fewer: int) -> str:
        path, make, work = EXAMPLES / name / f"{name}.py", vm.Study.__init__, vm.Study.run
        here = {"workers": 1, "budget": trials}
        monkeypatch.setattr(vm.Study, "__init__", lambda study, *given, **how: make(study, *given, **{**how, **fewer}))
        monkeypatch.setattr(vm.Study, "run", lambda study, *given, **how: work(study, *given, **{**how, **here}))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return script


def test_every_example_is_a_folder_with_a_page_and_a_script():
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        page = (folder / "README.md").read_text()
        scripts = [script.name for script in folder.glob("*.py")]
        assert scripts, f"{folder.name} has no script"
        assert all(name in page for name in scripts), f"{folder.name}/README.md does not name {scripts}"


@pytest.mark.slow
def test_quickstart_changes_a_model_and_answers_with_two_arms(run, tmp_path):
    output = run("quickstart", "answer", limit_train=600, seeds=2)

    assert "LinearStem -> DualPatchNormStem" in output  # the difference of the two models
    results = json.loads((tmp_path / "answer" / "results.json").read_text())
    assert results["complete"]
    assert [arm["name"] for arm in results["arms"]] == ["rms", "post-norm"]
    assert all(arm["effect"]["n"] == 2 for arm in results["arms"])
    scores = results["base"]["scores"].values()
    assert sum(scores) / len(scores) > 0.3, "the base has not learned: chance is 0.1"
    assert f"n=2, {results['arms'][1]['effect']['verdict']})" in output
    assert (tmp_path / "answer" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_segmentation_finds_shapes_and_draws_them(run, tmp_path):
    output = run("segmentation", "out", seeds=1)

    results = json.loads((tmp_path / "out" / "study" / "results.json").read_text())
    scores = results["base"]["scores"].values()
    assert sum(scores) / len(scores) > 0.5, "background alone gives a third at most"
    assert len(list((tmp_path / "out" / "drawn").iterdir())) == 4
    assert "Predictions</h2>" in (tmp_path / "out" / "study" / "report.html").read_text()
    assert "square" in output


@pytest.mark.slow
def test_detection_finds_shapes(run, tmp_path):
    output = run("detection", "out", trials=1, seeds=1)

    results = json.loads((tmp_path / "out" / "study" / "results.json").read_text())
    scores = results["base"]["scores"].values()
    assert sum(scores) / len(scores) > 0.25, "nothing is found by chance"
    assert "Predictions</h2>" in (tmp_path / "out" / "study" / "report.html").read_text()
    assert "box AP" in output


@pytest.mark.slow
def test_a_published_table_stands_beside_ours(run, tmp_path):
    output = run("published_table", "answer", limit_train=600)

    assert re.search(r"^Comparison with Dual PatchNorm, Table 6: \d+ consistent, ", output, re.M)
    assert re.search(r"^ pre +\S+ \[.*-0.2 \(S/32\), ", output, re.M)
    assert "Differences are to dpn." in (tmp_path / "answer" / "report.html").read_text()


@pytest.mark.slow
def test_two_tasks_are_served_from_one_backbone(run):
    output = run("two_tasks", "out")

    digits, photographs = (float(value) for value in re.findall(r"^\w+: top-1 (.+)$", output, re.M))
    assert digits > 0.7, "chance is 0.1"
    assert photographs > 0.65, "chance is 0.5"
    served = re.findall(r"^(?:digits|photographs|together) .* ([\d.]+) MB$", output, re.M)
    first, second, together = map(float, served)
    assert together < 0.75 * (first + second)
    assert "The second task takes 59 kB beside the base." in output


@pytest.mark.slow
def test_listops_compares_norms_on_sequences_and_reads_a_text(run, tmp_path):
    output = run("listops", "out", seeds=1)

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["complete"]
    assert [arm["name"] for arm in results["arms"]] == ["dtn", "batch"]
    scores = results["base"]["scores"].values()
    assert sum(scores) / len(scores) > 0.3, "chance is 0.1, the most frequent class 0.2"
    assert re.findall(r"^line (\d) is \d$", output, re.M) == ["1", "2"]


@pytest.mark.slow
def test_pretraining_connects_its_stages(run, tmp_path):
    output = run("pretraining", "out", seeds=1)

    assert output.count("Effects are differences") == 4
    answers = {
        name: json.loads((tmp_path / "out" / name / "results.json").read_text())
        for name in ("dino", "beit", "tuned", "lit")
    }
    assert all(answer["complete"] for answer in answers.values())
    scores = {name: next(iter(answer["base"]["scores"].values())) for name, answer in answers.items()}
    assert min(scores["dino"], scores["beit"]) > 0.3, "chance is 0.25"
    assert scores["tuned"] > 0.5
    towers = [load_file(tmp_path / "out" / name / "trials/dpn/seed0/model.safetensors") for name in ("tuned", "lit")]
    assert all(torch.equal(value, towers[0][name]) for name, value in towers[1].items()), "the image tower is frozen"
