"""The ledger of looks: which tables are one more look, what it costs them, and what the file survives."""

import json
import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vitmods.evals.options import Options
from vitmods.recipes import plain
from vitmods.stats.fit import fit
from vitmods.stats.sequential import INTERIM_LEVEL, interim_level
from vitmods.stats.width import against_base
from vitmods.study import Answer, Study
from vitmods.study.ledger import ShownTable, earlier_looks, enter, is_own, ledger_of, ledgers_of, read_ledgers
from vitmods.study.settings import Measure
from vitmods.study.tables import over_studies

pytestmark = pytest.mark.usefixtures("short_clocks")
RECIPE = plain(epochs=1).with_(batch_size=16)
OPTIONS = {"workers": 1, "device": "cpu", "cost_seconds": 0, "progress": False}


@pytest.fixture(autouse=True)
def search_beside(monkeypatch):
    monkeypatch.delenv("VITMODS_REUSE", raising=False)
    monkeypatch.delenv("VITMODS_LEDGER", raising=False)


# ---- what is one more look


def table(arms="ab", seeds=5, study="one", base="base", split="", begun="", **other):
    """A table of arms, whose trials are known by their names and the split."""
    seeds = tuple(range(seeds) if isinstance(seeds, int) else seeds)
    settings = {"metric": "top1", "margin": 0.5, "generalize": "images", "until_decided": False, "base_seeds": seeds}
    settings |= {"spare": False, "family": len(arms), **other}
    hashed = {arm: (f"{arm}-{arm}{split}",) for arm in arms}
    study, images, base = f"{begun or study} {study}", (f"images{split}",), (f"{base}-{base}{split}",)
    return ShownTable(study=study, seeds=seeds, images=images, base=base, arms=hashed, **settings)


FIRST = table()


@pytest.mark.parametrize(
    ("later", "most", "family", "says"),
    [
        (table(), None, 2, ""),
        (table(study="two"), None, 2, ""),
        (table(study="two", base="other"), 5, 2, "shown before"),
        (table("a", study="two"), 5, 2, "shown before, with other arms or seeds (one)"),
        (table("ac", study="two"), 5, 3, "shown before"),
        (table("abc", study="two"), None, 3, "2 arms were planned, and there are 3 now"),
        (table("c", study="two"), None, 1, "with other arms in 1 other study. Of such series 9 to 10 %"),
        (table("c", seeds=[5, 6], study="two"), None, 1, ""),
        (table(seeds=8), 8, 2, "shown before"),
        (table(seeds=[1, 2, 3, 4], study="two"), 5, 2, "shown before"),
        (table(seeds=33, study="two"), 64, 2, "shown before"),
        (table(seeds=[5, 6, 7], study="two"), None, 2, "other seeds, another split"),
        (table(split="2", study="two"), None, 2, "other seeds, another split"),
        (table(until_decided=True, seeds=16), 16, 2, "shown before"),
        (table(base_seeds=tuple(range(9)), study="two"), 5, 2, "shown before"),
        (table(metric="nll", margin=0.01), None, 2, "metric was changed after the scores were seen: it is nll and was"),
        (table(margin=1.0), None, 2, "The margin was changed after the scores were seen: it is 1 and was 0.5."),
        (table(generalize="seeds"), None, 2, "about was changed after the scores were seen: it is seeds and was"),
        (table(settings=3), None, 2, "number of settings was changed after the scores were seen: it is 3 and was 1."),
        (table(family=8), None, 8, ""),
    ],
)
def test_what_is_one_more_look_at_a_table(later, most, family, says):
    earlier = earlier_looks(later, [FIRST])
    assert (earlier.most, earlier.family) == (most, family)
    assert len(earlier.doubts) == bool(says), earlier.doubts
    assert says in "".join(earlier.doubts)
    assert earlier_looks(FIRST, [FIRST, later]) == earlier_looks(FIRST, []), "what came later changes nothing"
    assert earlier_looks(later, [FIRST, later, later]) == earlier, "the same table again is no look"


def test_images_are_known_by_their_content_wherever_they_are():
    """The kind of a cell has their place."""

    def elsewhere(table):
        arms = {name: tuple(f"other{cell}" for cell in cells) for name, cells in table.arms.items()}
        return replace(table, arms=arms, base=tuple(f"other{cell}" for cell in table.base))

    for later in (table("a", study="two"), table("ac", study="two"), table(seeds=8), table("c", study="two")):
        assert earlier_looks(elsewhere(later), [FIRST]) == earlier_looks(later, [FIRST])
    (doubt,) = earlier_looks(elsewhere(table(seeds=[5, 6, 7], study="two")), [FIRST]).doubts
    assert "other seeds, another split" in doubt
    assert earlier_looks(elsewhere(table(study="two")), [FIRST]).most is None, "the same table again"


def test_looks_share_one_level_and_the_family_is_all_arms_that_were_shown():
    lines = [table("abcd", 6)]
    for out in range(6):
        later = table("b", [seed for seed in range(6) if seed != out], study=out)
        earlier = earlier_looks(later, lines)
        assert earlier.family == 4
        assert interim_level(5, 5, earlier.most) == pytest.approx(INTERIM_LEVEL * (5 / 6) ** 2 / (out + 1), rel=0.3)
        lines.append(later)
    others = [table("a"), table("x", study="two"), table("y", study="three")]
    assert earlier_looks(table("a", 8, study="four"), others).family == 3


def test_seeds_that_time_settles_are_no_look():
    running, settled = table(seeds=10, spare=True), table(seeds=4)
    assert earlier_looks(settled, [running]).most is None
    assert earlier_looks(table(seeds=4, study="renamed", begun="one"), [running]).most is None
    assert earlier_looks(table("c", seeds=4, study="renamed", begun="one"), [running]).doubts, "begun at the same time"
    assert earlier_looks(table(seeds=4, study="two"), [running]).most == 10
    assert earlier_looks(table("a", seeds=4, study="two"), [running, settled]).most == 10, "one study is one look"


def test_a_study_of_folds_that_grew_is_one_series():
    folds = [replace(table(study="two"), base=("base-",), arms={"a": ("a-1",)})]
    folds += [replace(folds[0], base=("base-", *map(str, range(n))), arms={"a": ("a-1", "a-2")}) for n in range(4)]
    (doubt,) = earlier_looks(table("a", [7, 8]), folds).doubts
    assert "Of such series 9 to 10 %" in doubt
    (doubt,) = earlier_looks(table("a", [7, 8]), [*folds, table("a", [5, 6], study="three")]).doubts
    assert "Of such series 13 to 15 %" in doubt


def test_the_best_of_several_bases():
    bases = [table("", study=name, base=name) for name in "xyz"]
    (doubt,) = earlier_looks(table(base="z"), bases).doubts
    assert "beside those of 2 other bases on these images" in doubt
    assert not earlier_looks(table(base="z"), bases[1:]).doubts, "the better one of two"
    assert not earlier_looks(table(base="new"), bases).doubts
    assert not earlier_looks(table(base="z", seeds=[7, 8]), bases).doubts
    assert not earlier_looks(table(base="z", split="2"), [*bases[:2], table("", base="z", split="2")]).doubts


# ---- error rates


class Series:
    """Tables that are shown one after the other, and in which studies one of them ever made a false claim."""

    def __init__(self, studies, k, n):
        self.scores = np.random.default_rng(0).standard_normal((studies, k + 1, n))
        self.lines, self.ever, self.k = [], np.zeros(studies, bool), k

    def show(self, arms, seeds, rows=None, planned=None, **other):
        """Arms by number; `rows` are those of each study, where they follow from its scores."""
        shown = table("".join(map(chr, np.add(arms, 97))), planned or seeds, study=len(self.lines), **other)
        earlier = earlier_looks(shown, self.lines)
        self.lines.append(shown)
        alpha = interim_level(len(seeds), len(shown.seeds), earlier.most) or 0.05
        rows = np.broadcast_to(arms, (len(self.ever), len(arms))) if rows is None else rows
        base = np.full((len(self.ever), 1), 0)
        x = np.take_along_axis(self.scores, np.concatenate([base, rows + 1], 1)[..., None], 1)
        x = np.where(np.isin(np.arange(x.shape[-1]), seeds), x, np.nan)
        if "base_seeds" in other:
            x[:, 0] = self.scores[:, 0]
        x = x[..., ~np.isnan(x).all((0, 1))]
        result = fit(x).against
        width = against_base(result, None, alpha, earlier.family)
        self.ever |= (np.abs(result.estimate + width.shift) > width.seeds).any(-1)

    @property
    def ranked(self):
        """The arms of each study, the best first, on five seeds."""
        return np.argsort(-self.scores[:, 1:, :5].mean(-1), -1)


def best_alone(series):
    series.show(range(series.k), range(5))
    series.show([0], range(5), series.ranked[:, :1])


def worst_dropped(series):
    for k in range(series.k, 0, -1):
        series.show(range(k), range(5), series.ranked[:, :k])


def one_more(series, planned, singles=False, first=3):
    for n in range(first, series.scores.shape[-1] + 1):
        series.show(range(series.k), range(n), planned=range(16) if planned and n == first else None)
        for arm in range(series.k) if singles else ():
            series.show([arm], range(n))


def left_out(series):
    series.show(range(series.k), range(6))
    for out in range(6):
        series.show(range(series.k), [seed for seed in range(6) if seed != out])


def base_known_later(series):
    series.show(range(series.k), range(5))
    series.show(range(series.k), range(5), base_seeds=tuple(range(16)))


CASES = {
    **{f"best alone {k}": (k, 5, best_alone) for k in (2, 4, 8)},
    **{f"worst dropped {k}": (k, 5, worst_dropped) for k in (4, 8)},
    **{f"3 to 16 planned {k}": (k, 16, partial(one_more, planned=True)) for k in (1, 4)},
    **{f"3 to 16 {k}": (k, 16, partial(one_more, planned=False)) for k in (1, 4)},
    "and single arms, planned": (4, 16, partial(one_more, planned=True, singles=True)),
    "and single arms": (4, 16, partial(one_more, planned=False, singles=True)),
    **{f"5 to {n} {k}": (k, n, partial(one_more, planned=False, first=5)) for k, n in ((1, 8), (1, 32), (4, 32))},
    **{f"one of six left out {k}": (k, 6, left_out) for k in (1, 4, 8)},
    **{f"base known later {k}": (k, 16, base_known_later) for k in (1, 4)},
}
SHORT = (
    "best alone 4",
    "worst dropped 4",
    "3 to 16 planned 4",
    "and single arms",
    "5 to 32 1",
    "one of six left out 4",
)


@pytest.mark.parametrize(
    ("case", "studies"),
    [
        *(pytest.param(case, 2_000, id=f"{case} 2000") for case in (*SHORT, "one of six left out 4")),
        *(pytest.param(case, 20_000, id=f"{case} 20000", marks=pytest.mark.long) for case in CASES),
    ],
)
def test_all_looks_together(case, studies):
    k, n, shown = CASES[case]
    series = Series(studies, k, n)
    shown(series)
    rate = series.ever.mean()
    print(f"{100 * rate:.1f} %")
    assert rate <= 0.06 + 3 * np.sqrt(0.06 * 0.94 / studies) * (studies < 10_000)


# ---- studies


@pytest.fixture(scope="module")
def images(tmp_path_factory, draw_images):
    return draw_images(tmp_path_factory.mktemp("images") / "pets", ["train"], count=30)


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    """A folder with one study: base, dpn and rms, three seeds."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("VITMODS_REUSE", raising=False)
        patched.delenv("VITMODS_LEDGER", raising=False)
        study(images).run(root / "first", **OPTIONS)
    return root


@pytest.fixture
def runs(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "runs"))


def study(images, arms=("dpn", "rms"), seeds=3, base="mu/4", **options):
    return Study(base, arms, images, **{"recipe": RECIPE, "seeds": seeds, **options})


def test_reading_and_resuming_are_no_looks(images, runs):
    first = Answer.load(runs / "first")
    assert (first.decision.alpha, first.decision.family, first.doubts) == (0.05, 2, ())
    written = ledger_of(runs / "first").read_bytes()
    first.report()
    study(images).dry_run(runs / "second", **OPTIONS)
    again = study(images).run(runs / "first", **OPTIONS)
    moved = Answer.load(shutil.copytree(runs / "first", runs / "moved"))
    assert first.decision.to_dict() == again.decision.to_dict() == moved.decision.to_dict()
    assert ledger_of(runs / "first").read_bytes() == written
    study(images, ["dpn"]).run(runs / "best", **OPTIONS)
    assert Answer.load(runs / "first").to_dict() == first.to_dict(), "what came later changes nothing"
    assert sorted(path.name for path in runs.iterdir())[0] == ledger_of(runs / "first").name


@pytest.mark.parametrize(
    ("options", "alpha", "family", "says"),
    [
        ({"arms": ["b=dpn"], "no_reuse": True}, INTERIM_LEVEL, 2, "shown before, with other arms or seeds (first)"),
        ({"seeds": 2}, INTERIM_LEVEL * 4 / 9, 2, "Trials of these arms were shown before"),
        ({"seeds": 4, "until_decided": True}, INTERIM_LEVEL / 4, 2, "Trials of these arms were shown before"),
        ({"arms": ["layerscale"]}, 0.05, 1, "Base's trials were shown with other arms in 1 other study"),
        ({"arms": ["dpn", "rms", "layerscale"]}, 0.05, 3, "Arms were added after scores were seen: 2 arms"),
        ({"metric": "nll"}, 0.05, 2, "The metric was changed after the scores were seen: it is nll and was top1"),
        ({"seeds": [2, 0, 1]}, 0.05, 2, ""),
        ({"sweep": {"lr": [2e-3, RECIPE.optimizer.lr]}}, 0.05, 2, "The number of settings was changed after the sc"),
        ({"recipe": RECIPE.with_(lr=1e-3)}, 0.05, 2, ""),
    ],
)
def test_a_new_folder_does_not_forget(images, runs, options, alpha, family, says):
    first = Answer.load(runs / "first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = study(images, **options).run(runs / "second", **OPTIONS)
    assert answer.decision.alpha == pytest.approx(alpha)
    assert answer.decision.family == family
    doubts = [doubt for doubt in answer.doubts if "cannot be resolved" not in doubt]
    assert says in " ".join(doubts)
    assert bool(says) == bool(doubts)
    assert Answer.load(runs / "second").decision.to_dict() == answer.decision.to_dict()
    assert Answer.load(runs / "first").to_dict() == first.to_dict()


@pytest.mark.parametrize("place", ["{0}/", "{0}/../pets", "copy"])
def test_images_in_another_place_or_spelling_are_the_same(images, runs, tmp_path, place):
    shutil.copytree(images, tmp_path / "copy")
    data = tmp_path / place.format(images)
    answer = study(f"{data}/" if place.endswith("/") else data, ["dpn"]).run(runs / "second", **OPTIONS)
    assert (answer.decision.alpha, answer.decision.family) == (INTERIM_LEVEL, 2)
    assert "Trials of these arms were shown before" in " ".join(answer.doubts)
    answer = study(data, ["dpn"], seeds=[7, 8]).run(runs / "third", **OPTIONS)
    assert "These arms were compared before with other seeds" in " ".join(answer.doubts)


@pytest.mark.parametrize(
    ("holders", "folder", "place", "stage"),
    [
        ([], "one", "", ""),
        (["one/study.json"], "one", "", ""),
        (["one/study.json", "one/confirm/dpn/study.json"], "one/confirm/dpn", "", "-confirm"),
        (["study.json", "improve.json"], "one", "", ""),
        (["one/improve.json"], "one/screen", "", "-screen"),
        (["one/improve.json", "one/screen/study.json"], "one/screen/confirm/a+b", "", "-confirm"),
        (["one/over_data.json"], "one/pets", "", ""),
        (["one/over_data.json", "one/pets/study.json"], "one/pets/confirm/dpn", "", "-confirm"),
        ([], "confirm/one", "confirm", ""),
    ],
)
def test_the_ledger_of_a_stage_outlives_the_folder_of_all(tmp_path, holders, folder, place, stage):
    for name in holders:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    own = ledger_of(tmp_path / folder)
    assert own.parent == tmp_path / place
    assert own.name == f".vitmods-looks-{os.geteuid()}{stage}.jsonl"
    assert ledger_of(Path(os.path.relpath(tmp_path / folder))) == own
    assert ledgers_of(tmp_path / folder)[0] == own


def test_a_deleted_confirmation_is_not_forgotten(images, tmp_path):
    screen = study(images, design="factorial", seeds=2)
    for seeds, is_first in ((3, True), (3, True), (4, False), (2, False)):
        screen.run(tmp_path / "one", **OPTIONS)
        confirmed = screen.confirm(tmp_path / "one", seeds, arm="dpn", **OPTIONS)
        assert (confirmed.decision.alpha == 0.05) == is_first
        assert not any("other seeds" in doubt for doubt in confirmed.doubts), "it is no look at what it confirms"
        shutil.rmtree(tmp_path / "one")


def test_a_deleted_study_is_not_forgotten(images, runs):
    shutil.rmtree(runs / "first")
    assert study(images, ["dpn"]).run(runs / "second", **OPTIONS).decision.alpha == INTERIM_LEVEL
    third = study(images, ["rms"]).run(runs / "third", **OPTIONS)
    assert third.decision.alpha == INTERIM_LEVEL, "two looks, of other arms"
    again = study(images, ["dpn"], seeds=2).run(runs / "fourth", **OPTIONS)
    assert again.decision.alpha == pytest.approx(INTERIM_LEVEL * 4 / 9 / 2, rel=0.3), "the third look at dpn"


def test_a_study_that_is_older_than_the_ledger_counts(images, runs):
    ledger_of(runs / "first").unlink()
    best = study(images, ["dpn"]).run(runs / "second", **OPTIONS)
    assert best.decision.alpha == INTERIM_LEVEL, "the study that trained the trials is there"
    ledger_of(runs / "first").unlink()
    grown = study(images, seeds=4).run(runs / "first", **OPTIONS)
    assert grown.decision.alpha == INTERIM_LEVEL / 4, "it was shown before seeds were added"


def test_options_of_a_metric_are_part_of_it():
    usual, chosen = Measure("top1"), Measure("top1", Options(severities=(1, 2)))
    assert str(usual) == "top1" != str(chosen)
    (doubt,) = earlier_looks(table(metric=str(chosen)), [table(metric=str(usual))]).doubts
    assert "The metric was changed after the scores were seen" in doubt


def test_base_alone_is_entered(images, runs):
    for lr in (2e-3, 3e-3):
        study(images, None, seeds=2, recipe=RECIPE.with_(lr=lr)).run(runs / str(lr), **OPTIONS)
    answer = study(images, ["dpn"], seeds=2, recipe=RECIPE.with_(lr=3e-3)).run(runs / "second", **OPTIONS)
    assert any("beside those of 2 other bases" in doubt for doubt in answer.doubts)
    assert not any(Answer.load(runs / "first").doubts)


def test_averages_over_data_sets_know_of_looks(images, runs, draw_images, tmp_path):
    others = draw_images(tmp_path / "others", ["train"], classes=("cow", "hen"), count=30)
    study(others).run(runs / "others", **OPTIONS)
    assert over_studies([runs / "first", runs / "others"]).decision.alpha == 0.05
    study(images, seeds=4).run(runs / "first", **OPTIONS)
    study(others, seeds=4).run(runs / "others", **OPTIONS)
    assert over_studies([runs / "first", runs / "others"]).decision.alpha == INTERIM_LEVEL / 4


# ---- the file


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        *((line, 1) for line in (b"{", b"\xff\xfe\x00", b"[1]", b'{"study": "x"}', b"[" * 100_000)),
        *(
            (json.dumps({**FIRST.__dict__, **wrong}).encode(), 1)
            for wrong in ({"seeds": [1, "2"]}, {"seeds": 5}, {"arms": {"a": 1}}, {"extra": 1})
        ),
        (json.dumps({**FIRST.__dict__, "margin": float("nan")}).encode(), 2),
        (json.dumps(FIRST.__dict__)[:90].encode(), 1),
    ],
)
def test_a_damaged_line_does_not_count(tmp_path, line, counted):
    path = tmp_path / "ledger"
    enter(FIRST, path)
    with open(path, "ab") as file:
        file.write(line)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(read_ledgers([path])) == counted
        enter(table(study="two", seeds=3), path)
    assert any("the ledger of verdicts that were shown" in str(warning.message) for warning in caught) == (counted < 2)
    path.write_bytes(path.read_bytes().replace(b"\n" + line + b"\n", b"\n"))
    assert [len(found.seeds) for found in read_ledgers([path])] == [5, 3]


@pytest.mark.parametrize("clock", ["2000-01-01", "9999-01-01", ""])
def test_a_clock_that_was_set_back_makes_no_look_a_first_one(tmp_path, clock, monkeypatch):
    path, second = tmp_path / "ledger", table("a", study="two")
    path.write_text(json.dumps({**FIRST.__dict__, "time": "2030-01-01T00:00"}) + "\n", "utf-8")
    first = earlier_looks(second, read_ledgers([path]))
    path.write_text(path.read_text("utf-8") + json.dumps({**second.__dict__, "time": clock}) + "\n", "utf-8")
    assert first.most == 5
    assert earlier_looks(second, read_ledgers([path])) == first
    assert not earlier_looks(FIRST, read_ledgers([path])).doubts


def test_a_long_line_is_read(tmp_path):
    path = tmp_path / "ledger"
    path.write_text(json.dumps(FIRST.__dict__) + " " * (65 << 20) + "\n", "utf-8")
    assert earlier_looks(table("a", study="two"), read_ledgers([path])).most == 5, "more than settings may have"


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "another user's", "broken link"])
def test_a_ledger_that_is_no_file_of_this_user_is_not_believed(tmp_path, kind, monkeypatch):
    path, real = tmp_path / "ledger", tmp_path / "real"
    enter(FIRST, real)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "another user's":
        shutil.copy(real, path)
        monkeypatch.setattr("vitmods.study.ledger._user", lambda: os.geteuid() + 1)
    else:
        path.symlink_to(real if kind == "link" else "nowhere")
    with pytest.warns(UserWarning, match="ledger.*do not count"):
        assert read_ledgers([path]) == []
    if kind != "another user's":
        with pytest.warns(UserWarning, match="cannot be written"):
            enter(FIRST, path)
    assert len(real.read_bytes().splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_a_warning(images, runs, monkeypatch):
    real = os.open

    def read_only(path, flags, *mode, **options):
        if str(path).endswith(".jsonl") and flags & os.O_WRONLY:
            raise OSError(30, "Read-only file system")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr("os.open", read_only)
    with pytest.warns(UserWarning, match="cannot be written.*are not known to later studies"):
        answer = study(images, ["dpn"]).run(runs / "second", **OPTIONS)
    assert answer.decision.alpha == INTERIM_LEVEL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Answer.load(runs / "first").decision.alpha == 0.05, "which is there already"


def test_studies_that_end_at_once_do_not_damage_it(tmp_path):
    path = tmp_path / "ledger"
    tables = [table("a" * 50, seeds=[number], study=number) for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda shown: enter(shown, path), tables))
    assert {found.study for found in read_ledgers([path])} == {shown.study for shown in tables}
    assert replace(read_ledgers([path])[0], time="") in tables
    assert is_own(path)
    assert path.stat().st_mode & 0o022 == 0
