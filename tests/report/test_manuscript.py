"""What a paper takes from a study: citations, the paragraph of methods, and figures as files."""

import dataclasses
import re
from pathlib import Path

import pytest

from vitmods.cli import main
from vitmods.report import write_report
from vitmods.report.citations import Citation
from vitmods.report.manuscript import bibtex, methods


@pytest.fixture(scope="module")
def study(synthetic, tmp_path_factory):
    return synthetic.make_answer(tmp_path_factory.mktemp("manuscript"), arms=3, evaluations=3)


@pytest.mark.parametrize(
    ("paper", "url", "expected"),
    [
        (
            "Kumar, Dehghani & Houlsby: Dual PatchNorm. TMLR 2023, Table 6",
            "https://x",
            ["@article{kumar2023dual,", "author = {Manoj Kumar and Mostafa Dehghani and Neil Houlsby}", "{2023}"],
        ),
        (
            "d'Ascoli et al.: ConViT: Soft 50 % & more. ICML 2021",
            "https://arxiv.org/abs/2103.10697",
            ["@inproceedings{dascoli2021convit,", "d'Ascoli and others", r"{ConViT: Soft 50 \% \& more}", "2103.10697"],
        ),
        ("Shazeer: GLU Variants. 2020", "https://arxiv.org/abs/2002.05202", ["@misc{shazeer2020glu,", "arXiv"]),
        ("my own idea", "", ["@misc{my,", "title = {{my own idea}}"]),
    ],
)
def test_a_paper_becomes_an_entry(paper, url, expected):
    (citation,) = Citation.read(paper, url)
    entry = citation.bibtex(citation.key)
    assert all(words in entry for words in expected), entry
    assert entry.count("{") == entry.count("}")


def test_papers_of_changes_and_tables_are_cited_once(study):
    changes = ["kumar2023dual", "zhang2019root"]
    statistics = ["dunnett1955multiple", "satterthwaite1946approximate", "sidak1967rectangular"]
    software = ["wightman2019pytorch", "paszke2019pytorch", "vitmods"]
    keys = re.findall(r"^@\w+\{(.*),$", bibtex(study), flags=re.MULTILINE)
    assert keys == [*changes, "loshchilov2019decoupled", *statistics, *software]
    of_table = dataclasses.replace(study, command="vitmods paper run dtn-table5", arms=study.arms[2:])
    assert "@inproceedings{shao2022dynamic," in bibtex(of_table)
    file = Path(__file__).parents[2] / "CITATION.cff"
    title = re.search(r'^title: "(.*)"$', file.read_text(), flags=re.MULTILINE)[1]
    assert f"title = {{{{{title}}}}}" in bibtex(study)


def changed(answer, recipe=None, **settings):
    parts = {**answer.settings["recipe"], **(recipe or {})}
    return dataclasses.replace(answer, settings={**answer.settings, "recipe": parts, **settings})


def test_methods_follow_the_settings(study, synthetic, tmp_path):
    text = methods(study)
    images = study.data["splits"]
    for words in (
        "3 arms with the unchanged model (base): dpn (Dual PatchNorm; Kumar et al., 2023)",
        "parameters: 12 blocks, width 192, 3 heads, patches of 4 × 4 in images of 32 × 32 pixels.",
        "trained from random weights, initialized by timm's rule: linear maps and positions normal",
        "Pixels from 0 to 1 were normalized with mean 0.5 and standard deviation 0.5.",
        "Dunnett's method for arms against one base (Dunnett, 1955)",
        "crossed random effects of seeds and images, whose degrees of freedom are approximate (Satterthwaite, 1946)",
        "They do not cover other training sets or splits, recipes, sizes of models and data sets, nor failures",
        "Models were trained in float32 on a processor with 2 threads.",
        f"{images['train']['count']:,} training images, 500 validation images and 1,000 test images",
        "The splits are those of the data set.",
        "AdamW (Loshchilov & Hutter, 2019) with learning rate 0.001, weight decay 0.05, beta1 0.9, beta2 0.999 and the "
        "cosine schedule",
        "Every model was trained for 30 epochs (2,700 steps)",
        "Training used the cross-entropy loss and gradients clipped at norm 1.",
        "with the same 5 seeds.",
        "simultaneous 95 % intervals for 3 effects",
        "new seeds and new images from the same source",
        "±0.5 points",
        "vitmods 0.1.0 with PyTorch 2.11.0",
    ):
        assert words in text, (words, text)
    assert "  " not in text
    assert "\n" not in text
    flips = {**study.settings["recipe"]["augment"], "flip": 0.0, "mixup": 0.2}
    assert "mixup with α 0.2" in methods(changed(study, {"augment": flips}))
    many = {
        "loss": {**study.settings["recipe"]["loss"], "label_smoothing": 0.1},
        "ema": 0.999,
        "precision": "bf16-mixed",
    }
    with_many = methods(changed(study, many))
    assert "loss, label smoothing 0.1, gradients clipped at norm 1 and an average of the weights" in with_many
    assert "with decay 0.999." in with_many
    assert "trained in bfloat16 with weights in float32 on a processor with 2 threads." in with_many
    assert "horizontal flips" in text
    assert "horizontal flips" not in methods(changed(study, {"augment": flips}))
    assert "Only attention and the head were trained" in methods(changed(study, {"train": "attention"}))
    assert "fold s mod 5" in methods(changed(study, folds=5))
    assert "at most 5" in methods(changed(study, until_decided=True))
    assert "the trained weights path/to/base" in methods(changed(study, start={"source": "/home/me/base"}))
    made = dataclasses.replace(study, data={**study.data, "split_origin": "found; val made from train, seed 7"})
    assert "drawn from its training images within each class (seed 7)" in methods(made)
    these = dataclasses.replace(study, decision=dataclasses.replace(study.decision, generalize="seeds"))
    assert "on these test images only." in methods(these)
    tuned = methods(synthetic.make_answer(tmp_path, arms=2, evaluations=3, tuned=True))
    assert "Tuned on val: lr in 0.0001, 0.0003, 0.001 and weight_decay in 0.03, 0.1" in tuned
    unfinished = methods(synthetic.make_answer(tmp_path, arms=2, evaluations=3, missing=[(0, 4)]))
    assert "The study is not complete: 14 of 15 planned trials have ended." in unfinished


def test_the_command_prints_one_text_and_writes_nothing(study, capsys, monkeypatch):
    monkeypatch.setattr("vitmods.study.Answer.load", lambda folder, reference: study)
    texts = {"latex": study.to_latex(), "markdown": study.to_markdown(), "bibtex": bibtex(study)}
    for name, text in (texts | {"methods": methods(study)}).items():
        assert main(["report", "study", f"--{name}"]) == 0
        assert capsys.readouterr().out == f"{text}\n"
    assert not list(study.path.iterdir())


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_figures_of_the_answer_are_files_without_dates(study, kind, tmp_path):
    first, second = (write_report(study, tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
    assert first == second
    assert first.startswith({"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}[kind])
    if kind == "pdf":
        assert b"/CreationDate" not in first
        assert b"/Type42" in first or b"/CIDFontType2" in first or b"/TrueType" in first
        assert b"/Type3" not in first
