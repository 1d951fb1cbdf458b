"""Which papers an arm cites: those of its own kind of stem or norm, with all authors."""

import re

import vitmods as vm
from vitmods.changes.base import REGISTRY
from vitmods.finetune.roles import WAYS
from vitmods.layers import NORMS
from vitmods.layers.stems import STEMS, LinearStem
from vitmods.papers import TABLES
from vitmods.papers.table import PAPERS
from vitmods.report.citations import PAPERS as PAPERS_KNOWN
from vitmods.report.citations import WORKS, Citation, References
from vitmods.study.arms import arms_from_text, find_line_up

STEM_KEYS = {
    "hmlp": ["touvron2022three"],
    "levit": ["graham2021levit"],
    "linear": ["dosovitskiy2021image", "touvron2022three"],
    "local": ["han2021transformer"],
    "t2t": ["yuan2021tokens"],
    "tokens": ["tay2021long"],
}
NORM_KEYS = {
    "batch": "ioffe2015batch",
    "derf": "chen2026stronger",
    "dynamic_token": "shao2022dynamic",
    "dyt": "zhu2025transformers",
    "group": "wu2018group",
    "instance": "ulyanov2016instance",
    "layer": "ba2016layer",
    "layer_centered": "ba2016layer",
    "power": "shen2020powernorm",
    "rms": "zhang2019root",
    "scale": "nguyen2019transformers",
    "scale_shift": "kumar2023dual",
    "switchable": "luo2019differentiable",
    "whiten": "kumar2023dual",
}
LINE_UPS = [f"paper:{table.name}" for table in TABLES.values() if table.study] + ["norms", "vit5", "adapt"]


def keys(paper, url=""):
    return [citation.key for citation in Citation.read(paper, url)]


def test_every_kind_of_stem_and_norm_has_its_own_paper():
    assert {name: keys(stem.paper) for name, stem in STEMS.items()} == STEM_KEYS
    assert {name: keys(kind.paper) for name, kind in NORMS.items()} == {name: [key] for name, key in NORM_KEYS.items()}
    assert all(stem.url.startswith("https://arxiv.org/abs/") for stem in STEMS.values())
    assert keys(vm.Placement().describe()["paper"]) == ["kumar2023dual", "xiong2020layer"]
    assert keys(vm.parse_changes("registers(trained=false)")[0].describe()["paper"]) == ["jiang2025vision"]


def test_every_arm_of_a_line_up_cites_what_it_is():
    """Its own kind of stem or norm, where it has kinds, and the paper of its change otherwise."""
    for text in LINE_UPS:
        assert text == "norms" or find_line_up(text)
        arms = arms_from_text(text)
        assert arms
        for edit in (edit for arm in arms for edit in arm.changes):
            change = getattr(edit, "change", edit)  # of replace(...)
            kinds = {"stem": STEMS, "norm": NORMS}.get(change.name)
            paper = kinds[change.kind].paper if kinds else type(change).paper
            assert keys(edit.describe()["paper"]) == keys(paper) != [], f"{text}: {edit}"


def test_papers_are_whole_citations_with_all_their_authors():
    facts = [(change.paper, change.url) for change in REGISTRY.values()]
    facts += [(kind.paper, kind.url) for kind in (*NORMS.values(), *STEMS.values())]
    facts += [(way.paper, "") for way in WAYS.values()]
    facts += [(paper.cited, paper.url) for paper in PAPERS.values() if paper.venue]
    facts += [(vm.parse_changes("registers(trained=false)")[0].describe()["paper"], "")]
    read = [citation for paper, url in facts for citation in Citation.read(paper, url)]
    for citation in read:
        assert re.fullmatch(r"(19|20)\d\d", citation.year), citation
        assert not re.search(r"et al|\d{4}$|section|Table", citation.title), citation
    for paper, url in facts:
        citations = Citation.read(paper, url) if url else []
        assert all(one.venue or "arxiv.org" in one.url for one in citations), paper
        assert all(one.url.startswith("https://") for one in citations[:1]), paper
    read += WORKS.values()
    assert {citation.title for citation in read} == PAPERS_KNOWN["authors"].keys()
    for citation in read:
        names = PAPERS_KNOWN["authors"][citation.title].split(" and ")
        families = [family for family in citation.authors if family != "others"]
        assert families
        assert all(" " in name for name in names), citation.title  # given names or initials
        for name, family in zip(names, families, strict=False):
            assert name.startswith(f"{family},") or name.endswith(f" {family}"), (name, family)
        assert len(names) > len(families) if "others" in citation.authors else len(names) == len(families)


def test_a_stem_from_outside_cites_what_it_says_or_nothing():
    try:
        vm_stems = {}
        for name, facts in {"mine": {}, "ours": {"paper": "Doe & Roe: Our stem. 2026", "url": "https://x.org"}}.items():
            vm_stems[name] = STEMS.add(name, type(f"{name.title()}Stem", (LinearStem,), {"title": "my stem", **facts}))
        described = {name: vm.Stem(name).describe() for name in vm_stems}
        assert (described["mine"]["paper"], described["mine"]["url"], described["mine"]["published"]) == ("", "", "")
        assert keys(described["ours"]["paper"]) == ["doe2026our"]
        assert "my stem" in described["mine"]["title"]
        assert "my stem" in described["mine"]["summary"]
    finally:
        for name in ("mine", "ours"):
            STEMS.remove(name)


def test_an_entry_is_ascii_and_has_given_names():
    (citation,) = Citation.read("d'Ascoli et al.: ConViT: Improving Vision Transformers with Soft Convolutional "
                                "Inductive Biases. ICML 2021", "https://arxiv.org/abs/2103.10697")  # fmt: skip
    entry = citation.bibtex(citation.key)
    assert r"author = {St{\'{e}}phane d'Ascoli and Hugo Touvron and" in entry
    assert "others" not in entry
    assert WORKS["sidak"].key == "sidak1967rectangular"


def test_papers_with_one_key_are_told_apart_and_unknown_marks_stay(synthetic):
    answer = synthetic.make_answer("study", arms=1, evaluations=3)
    (change,) = answer.arms[0].model.changes
    object.__setattr__(change, "paper", "Doe: Our stem. 2026; Doe: Our norm. 2026")
    known = References(answer)
    assert list(known.by_key) == ["doe2026our", "doe2026ourb"]
    shown = known.render("a [@Our norm] b [@c]", str.upper, lambda key, citation: f"<{key}>")
    assert shown == "A <doe2026ourb> B [@C]"
    assert re.search(r"author = \{Doe\}", known.bibtex("1", "2026"))
