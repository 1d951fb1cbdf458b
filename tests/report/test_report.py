"""The report as text: what it says, that it escapes what users name, and that it needs nothing from outside."""

import dataclasses
import math
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

import vitmods as vm
from vitmods.layers import NORMS
from vitmods.model.slots import NormConfig
from vitmods.report import write_report
from vitmods.report.advice import extended, next_steps
from vitmods.report.drawing import draw
from vitmods.report.figures import Inliner, axes_of, curve_panel, mean_curve
from vitmods.report.page import Page, render
from vitmods.report.templates import differences, thumbnails
from vitmods.report.text import caveats, common_claim, headline, mean
from vitmods.stats.tables import signed
from vitmods.stats.verdict import Verdict
from vitmods.study.answer import Running
from vitmods.study.questions import confirmation
from vitmods.study.state import Curve, TrialRecord
from vitmods.tasks.metrics import Metric

TOP1 = Metric("top1", "top-1 accuracy", "top1")
HOSTILE = ["<script>alert(1)</script>", "\"quoted\" & 'single'", "naïve – 腕 ΔΣ", "$x_1$ {{ 7*7 }}"]


class Loads(HTMLParser):
    """Collects ids, tags, text, and whatever a browser would fetch."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.fetched, self.links, self.tags, self.text = [], [], [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        if attrs.get("id"):
            self.ids.append(attrs["id"])
        if tag == "a":
            self.links.append(attrs["href"])
        else:
            self.fetched += [
                attrs[key] for key in ("src", "href", "srcset", "data", "action", "xlink:href") if key in attrs
            ]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def study(synthetic, tmp_path_factory):
    answer = synthetic.make_answer(
        tmp_path_factory.mktemp("report"),
        evaluations=200,
        diverge=[(4, 1)],
        rename=dict(enumerate(HOSTILE, 5)),
        classes=["cat", *HOSTILE],
    )
    first, *arms = answer.arms
    change = dataclasses.replace(first.model.changes[0], url="javascript:alert(1)", paper="<b>bold</b>")
    first = dataclasses.replace(first, model=dataclasses.replace(first.model, changes=(change,)))
    bad = [{"split": "train", "path": "a/<img src=x>.jpg", "reason": "truncated"}]
    return synthetic.changed(
        answer,
        arms=(first, *arms),
        data={**answer.data, "unreadable": bad, "left_out": 1},
        warnings=(*answer.warnings, "1 image that cannot be read was left out."),
        command=answer.command + " --data '<i>'",
        samples=tuple(synthetic.sample_images(["cat", *HOSTILE])),
    )


@pytest.fixture(scope="module")
def page(study):
    return write_report(study).read_text(encoding="utf-8")


def words_of(page):
    return re.sub(r"\s+", " ", " ".join(Loads(page).text))


def test_every_arm_has_its_verdict_effect_and_cost(study, page, synthetic):
    assert len(page.encode()) < 2_000_000, "ten arms by five seeds"
    text = words_of(page)
    assert headline(study) in text
    for arm in study.arms:
        assert arm.name in text
        assert f"{signed(arm.effect.effect)} [{signed(arm.effect.low)}, {signed(arm.effect.high)}]" in text
        assert f"{arm.effect.verdict}" in text
        assert f"{arm.cost.train_step.ratio:.2f}×" in text
    assert "dpn and $x_1$ {{ 7*7 }} help; " in text
    assert "post on MLP and post hurt." in text
    assert re.search(r"Published gains and ours .* dpn \+1\.\d\d \+0\.6 points \(S/16\)", text)
    assert "of val and test are test images" not in text
    small = synthetic.make_answer("study", arms=1, evaluations=3, classes=["cat", *HOSTILE])
    both = words_of(render(dataclasses.replace(small, splits=("val", "test"))))
    images = sum(study.data["splits"][name]["count"] for name in ("val", "test"))
    assert f"The {images:,} images of val and test are test images" in both


def test_what_users_name_is_escaped(page):
    loads = Loads(page)
    assert not {"script", "i", "b", "iframe", "object"} & set(loads.tags)
    text = "".join(loads.text)
    for name in [*HOSTILE, "<b>bold</b>", "a/<img src=x>.jpg", "--data '<i>'"]:
        assert name in text
    assert "49" not in re.findall(r"\$x_1\$ (\S+)", text)


def test_nothing_is_fetched_and_links_are_web_addresses(page):
    loads = Loads(page)
    assert all(target.startswith(("data:", "#")) for target in loads.fetched)
    assert all(link.startswith(("https://", "#")) for link in loads.links)
    assert "javascript:" not in page
    assert not re.search(r"url\((?!#)|@import|xmlns|<\?xml|<!DOCTYPE svg", page)
    assert "default-src 'none'" in page


def test_ids_are_unique_and_references_resolve(page):
    ids = Loads(page).ids
    assert len(ids) == len(set(ids))
    references = re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"|aria-labelledby=\"([^\"]+)\"", page)
    assert {"labelledby", "label", "hidden"} >= set(re.findall(r"aria-([a-z]+)=", page)), "no other name is known"
    assert any(by for *_, by in references)
    assert {next(filter(None, groups)) for groups in references} <= set(ids)


def test_plots_take_every_color_from_the_page(page):
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert not re.search(r"(fill|stroke): ?(#|rgb|black|white)", svg)
        assert 'aria-label="' in svg
    assert "DejaVu" not in page


def test_the_same_study_gives_the_same_page(study, page, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "lines.marker", "s")
    assert write_report(study, tmp_path / "new" / "r.html").read_text(encoding="utf-8") == page


def test_failures_and_doubts_stand_before_the_numbers(study, page, synthetic):
    assert page.index("1 of 5 post on MLP trials diverged") < page.index('class="narrow"') < page.index("left out.")
    assert caveats(study)[0].startswith("1 of 5 post on MLP trials diverged")
    many_seeds = synthetic.make_answer("study", seeds=16, diverge=[(4, 1)])
    assert "pre+post: hurts by less than the margin." in caveats(many_seeds)
    few_seeds = synthetic.make_answer("study", seeds=2)
    (caveat,) = [text for text in caveats(few_seeds) if "vary alike" in text]
    assert caveat.endswith(": the interval assumes that arms vary alike.")
    assert {arm.name for arm in few_seeds.arms} == set(re.split(", | and ", caveat.partition(":")[0]))
    first, second = (answer := synthetic.make_answer("study", arms=2)).arms
    left_out = synthetic.changed(answer, arms=(first, dataclasses.replace(second, effect=None)))
    assert caveats(left_out) == ["dpn(after=false) has no verdict: a trial of it failed or is damaged."]
    assert "that arm and base share" not in common_claim(answer)
    fewer = dataclasses.replace(first, effect=dataclasses.replace(first.effect, n=3, base_n=3, base_mean=71.234))
    claim = common_claim(synthetic.changed(answer, arms=(fewer, second)))
    assert claim.endswith("that arm and base share, where base reaches 71.23 for dpn (3 seeds).")
    known = dataclasses.replace(first, effect=dataclasses.replace(fewer.effect, base_n=16))  # all seeds of base count
    assert "share" not in common_claim(synthetic.changed(answer, arms=(known, second)))


def test_what_all_intervals_share_is_one_line(study, synthetic):
    line = common_claim(study)
    assert line.startswith("simultaneous 95 % intervals; new trainings and new images; pooled sd 0.1")
    assert re.search(r" points, 36 df; seed accounts for 9\d % of the variance between trials; ", line)
    assert re.search(r"; test-set sampling: \d+ % of the variance; ", line)
    these_images = synthetic.make_answer("study", arms=2, per_image=False)
    without = common_claim(these_images)
    assert without.endswith("0 of 5 trials of an arm failed (95 % upper bound 45 %).")
    assert "new trainings and these images alone" in without
    assert "test-set" not in without
    text = words_of(render(these_images))
    assert "Thin:" not in text
    assert "On other images" not in text
    equal = dataclasses.replace(study, decision=dataclasses.replace(study.decision, sd=0.0, seed_share=math.nan))
    assert "pooled sd 0 points, 36 df; test-set sampling" in common_claim(equal)


def test_an_unfinished_study_says_so_and_shows_what_there_is(synthetic, tmp_path):
    missing = [(-1, 1), (0, 1), (0, 2), *((1, seed) for seed in range(3))]
    answer = synthetic.make_answer(tmp_path, arms=2, seeds=3, missing=missing)
    running = dataclasses.replace(answer.arms[0].trials[1], curve=Curve((90,), (4.0,), (0.4,)))
    first = dataclasses.replace(answer.arms[0], trials=(answer.arms[0].trials[0], running, answer.arms[0].trials[2]))
    last = dataclasses.replace(answer.arms[1], cost=None)
    answer = synthetic.changed(answer, arms=(first, last), base_cost=None)
    text = words_of(write_report(answer).read_text())
    assert headline(answer) == "3 of 9 trials finished"
    assert headline(answer) in text
    assert "Verdicts are provisional" in text
    assert "not measured" in text
    assert [step.command for step in next_steps(answer)] == [answer.command], "nothing is recommended yet"
    looked_at = dataclasses.replace(answer, settings={**answer.settings, "until_decided": True})
    assert not any("analyzed once" in doubt for doubt in caveats(looked_at))


def test_a_page_of_a_running_study_says_until_when_it_holds(synthetic, tmp_path):
    """A run that is killed cannot write another one."""
    written = datetime(2025, 11, 20, 21, 34, tzinfo=UTC)
    answer = synthetic.make_answer(tmp_path, arms=2, seeds=3, missing=[(0, 2), (1, 2)])
    for due, late in (
        (written + timedelta(minutes=9), "If it is still here at 21:43, the run has stopped"),
        (written + timedelta(hours=9), "If it is still here at 06:34 on 2025-11-21, the run has stopped"),
        (None, "If it does not change for much longer than a trial takes, the run has stopped"),
    ):
        page = render(dataclasses.replace(answer, running=Running(written, 720.0 if due else None, due)))
        text = words_of(page)
        assert "Running: 7 of 9 trials" in text
        assert "Provisional: written on 2025-11-20 at 21:34." in text
        assert ("About 12 min left." in text) is (due is not None)
        assert f"{late}: the same command resumes it." in text
        assert '<meta http-equiv="refresh" content="20">' in page
        assert '<span class="badge open">' in page
        assert '<span class="badge helps">' not in page
    finished = render(answer)
    assert "Running" not in finished
    assert "refresh" not in finished


NOTHING = [(arm, seed) for arm in (-1, 0) for seed in range(2)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arms": 1, "seeds": 1}, "dpn is open."),
        ({"arms": 2, "diverge": [(0, seed) for seed in range(5)]}, "dpn: fails: 5 of 5, base 0 of 5."),
        ({"arms": 1, "seeds": 2, "missing": NOTHING}, "No seed has finished for both base and an arm yet."),
    ],
    ids=["one seed", "all diverged", "nothing finished"],
)
def test_small_and_broken_studies_have_a_page(synthetic, tmp_path, options, words):
    text = words_of(write_report(synthetic.make_answer(tmp_path, **options)).read_text())
    assert words in text
    assert "missing" not in options or "base has not finished" in text


def advice(answer):
    return [step.text for step in next_steps(answer)]


def test_the_cheapest_arm_that_may_be_best_is_to_be_taken(synthetic):
    answer = synthetic.make_answer("study")
    assert {"dpn", "dpn+rms"} == set(answer.decision.best)
    assert advice(answer)[0] == "Use dpn+rms: it helps."
    dpn = answer.arms[0]
    half = dataclasses.replace(dpn.cost, infer_n=dataclasses.replace(dpn.cost.infer_n, ratio=0.5))
    arms = (dataclasses.replace(dpn, cost=half), *answer.arms[1:])
    steps = next_steps(synthetic.changed(answer, arms=arms))
    assert steps[0].text == "Use dpn: it is the cheapest arm that may be best."
    assert steps[1].text.startswith(
        "Best: dpn or dpn+rms (no difference between them has been shown). Ruled out: base, "
    )
    assert steps[-1].command == "vitmods export study/trials/dpn/seed0 --to onnx"


def test_base_is_kept_where_nothing_beats_it(synthetic):
    answer = synthetic.make_answer("study", arms=4)
    arms = answer.arms[2:]
    decision = dataclasses.replace(answer.decision, best=("base", *(arm.name for arm in arms)), ruled_out=())
    steps = next_steps(synthetic.changed(answer, arms=arms, decision=decision))
    assert steps[0].text == "No arm has been shown to beat base: keep it."
    assert "trials/base/seed0" in steps[-1].command
    decision = dataclasses.replace(decision, best=(arms[0].name,), ruled_out=("base", arms[1].name))
    steps = next_steps(synthetic.changed(answer, arms=arms, decision=decision))
    assert steps[0].text == f"No interval is above zero, but base is ruled out as the best arm: try {arms[0].name}."


def test_the_headline_names_what_arms_are_compared_with(synthetic):
    answer = synthetic.make_answer("study", arms=1)
    effect = dataclasses.replace(answer.arms[0].effect, arm="a{x}", verdict=Verdict.NO_WORSE)
    arm = dataclasses.replace(answer.arms[0], name="a{x}", effect=effect)
    answer = synthetic.changed(answer, base=dataclasses.replace(answer.base, name="{plain}"), arms=(arm,))
    assert headline(answer) == "a{x} is no worse than {plain}."
    questions = {**answer.questions, "confirmed": confirmation(effect, "{plain}")}
    confirmed = dataclasses.replace(answer, questions=questions)
    assert headline(confirmed).startswith(
        "a{x} is no worse than {plain}. On 5 fresh seeds a{x} is no worse than {plain}: "
    )


def test_weights_that_were_not_kept_cannot_be_deployed(synthetic, tmp_path):
    answer = synthetic.make_answer(tmp_path, arms=1)
    for seed in range(5):
        (tmp_path / f"trials/dpn/seed{seed}").mkdir(parents=True)
    assert next_steps(answer)[-1].command == f"{answer.command} --retrain dpn"
    unfinished = dataclasses.replace(answer, complete=False, looks=(SimpleNamespace(stopped=()),))
    assert advice(unfinished)[-1] == "To deploy dpn, retrain it: this study did not keep its weights."
    (tmp_path / "trials/dpn/seed3/model.safetensors").touch()
    assert next_steps(answer)[-1].command == f"vitmods export {tmp_path}/trials/dpn/seed3 --to onnx"


def opened(synthetic, **values):
    """Two arms, the first open as `values` say."""
    answer = synthetic.make_answer("study", arms=2)
    effect = dataclasses.replace(answer.arms[0].effect, verdict=Verdict.OPEN, images_sd=0.0, **values)
    return synthetic.changed(answer, arms=(dataclasses.replace(answer.arms[0], effect=effect), answer.arms[1]))


def test_more_seeds_than_there_are_trained_weights(synthetic, tmp_path):
    for seed in range(4):
        (tmp_path / f"seed{seed}").mkdir()
    answer = opened(synthetic, effect=1.5, sd=1.0, df=16.0, leans="up")
    answer = dataclasses.replace(answer, settings={**answer.settings, "start": {"source": str(tmp_path)}})
    assert "To decide these arms, after training weights for seeds 4 to 7 too:" in advice(answer)


def test_the_forecast_of_an_open_arm_and_the_command(synthetic):
    answer = opened(synthetic, effect=1.5, sd=1.0, df=16.0, leans="up")
    (line,) = (text for text in advice(answer) if text.startswith("dpn (leaning positive): chance of a verdict "))
    assert re.search(r"\d+ % with 8 seeds, \d+ % with 16, \d+ % with 32; 8 seeds take [\d.]+ h more\.$", line)
    (command,) = (step.command for step in next_steps(answer) if step.text == "To decide these arms:")
    assert command.endswith(" --until-decided --max-seeds 8")
    assert " --seeds" not in command


def test_arms_that_no_study_decides_stay_open(synthetic):
    texts = advice(opened(synthetic, effect=0.02, sd=2.0, df=16.0, n=20))
    assert "dpn: a verdict is not feasible with up to 32 seeds (chance below 10 %)." in texts
    assert any(text.startswith("Leave open arms open, or reduce the variance") for text in texts)
    assert not any("images would make it feasible" in text for text in texts)


def test_the_command_for_more_seeds():
    shell = "vitmods compare --arms dpn 'a b' --seeds 5 --budget=2h --out x"
    assert extended(shell, 16) == "vitmods compare --arms dpn 'a b' --out x --until-decided --max-seeds 16"
    call = "import vitmods as vm\n\nvm.Study(base='S/16', seeds=[0, 1, 2], margin=0.5, until_decided=True).run('x')"
    assert extended(call, 8).endswith("vm.Study(base='S/16', margin=0.5, seeds=8, until_decided=True).run('x')")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"stem": {"before": {"kind": "layer", "eps": 1e-6}}}, "LayerNorm (new), linear"),
        ({"attn": {"before": None, "after": {"kind": "layer"}}}, "LayerNorm (removed), attention"),
        ({"attn": {"before": None, "after": {"kind": "layer"}}}, "+, LayerNorm (new)"),
        ({"mlp": {"before": {"kind": "rms"}}}, "MLP branch: RMSNorm (changed)"),
        ({"mlp": {"inner": {"kind": "layer"}}}, "linear, GELU, LayerNorm (new), linear, +"),
        ({"layer_scale": 1e-4}, "linear, scale, 0.0001 (new), +"),
        ({"final_norm": None}, "12 blocks, LayerNorm (removed), class token"),
        ({"pool": "avg"}, "mean of tokens (changed)"),
        ({"head_scale": True}, "attention, scale of heads (new), linear"),
        ({"residual_scale": True}, "GELU, linear, scale of the stream (new), +"),
        ({"mlp": {"before": {"kind": "from <the> future"}}}, "from &lt;the&gt; future (changed)"),
    ],
)
def test_drawings_mark_what_differs_from_base(synthetic, edit, words):
    base = synthetic.edited({})
    config = {k: {**base[k], **edit[k]} if isinstance(edit.get(k), dict) else edit.get(k, v) for k, v in base.items()}
    assert words in str(draw(config, base, "arm"))
    assert "(" not in draw(base, base, "arm").split("aria-label=")[1].split(">")[0]


@pytest.mark.parametrize(
    ("size", "change", "words"),
    [
        ("mu6/4", vm.Parallel(3), ["attention, 2 × 3<", "MLP, 2 × 3<", "2 blocks of 3 (changed)"]),
        ("mu2/16", vm.DynamicTokenNorm(), ["1 block (new), + class token (new), 1 block (changed), LayerNorm"]),
        ("S/16", vm.DynamicTokenNorm(), ["attention, 10 of 12 ×", "10 blocks (new), + class token (new), 2 blocks"]),
        ("S/16", vm.DynamicTokenNorm(), ["Attention branch: Dynamic Token (changed)", "MLP branch: LayerNorm, linear"]),
    ],
)
def test_drawings_of_parallel_and_different_blocks(size, change, words):
    base = vm.ViTConfig.from_name(size)
    drawing = str(draw(dataclasses.asdict(change.edit(base)), dataclasses.asdict(base), "arm"))
    for part in words:
        assert part in drawing


def trial(scores, seconds=1.0, status="finished"):
    """A trial that was evaluated after every step."""
    steps = range(1, len(scores) + 1)
    curve = Curve(tuple(steps), tuple(seconds * step for step in steps), tuple(scores))
    return TrialRecord("dpn", 0, status, "trials/dpn/seed0", curve=curve)


def test_a_seed_on_a_busy_machine_does_not_cut_off_the_others():
    trials = [trial([0.1, 0.2, 0.3, 0.4]), trial([0.2, 0.3, 0.4, 0.5], seconds=10.0)]
    x, scores = mean_curve(trials, axes_of([trials])[1])
    assert scores.mean(0)[-1] == pytest.approx(0.45)
    assert x.tolist() == [5.5, 11.0, 16.5, 22.0]


def test_a_single_evaluation_is_a_dot_that_can_be_seen():
    for scores, dots in (([0.5], True), ([0.5, 0.6], False)):
        single = trial(scores)
        svg = curve_panel("arm", [single], [single], axes_of([[single]])[0], TOP1, Inliner())
        assert ("<use" in svg) == dots


def test_no_part_of_a_curve_is_cut_off(monkeypatch):
    drawn = []
    monkeypatch.setattr("vitmods.report.figures.Inliner.__call__", lambda self, figure, *_: drawn.append(figure))

    def limits(base, arm):
        curve_panel("arm", [base], [arm], axes_of([[base], [arm]])[0], TOP1, Inliner())
        return drawn[-1].axes[0].get_ylim()

    low, high = limits(trial([0.10, 0.35, 0.60, 0.97]), trial([0.02, 0.20, 0.95, 0.60]))
    assert -5 < low < 2
    assert 97 < high < 105
    diverged = trial([0.94, 0.8, 0.7, 0.05], status="diverged")
    low, _ = limits(trial([0.9, 0.95, 0.96, 0.97]), diverged)
    assert low > 85, "a trial that diverged does not flatten the others"


def test_a_norm_of_an_arm_is_one_readable_value():
    base = {"width": 32, "final_norm": {"kind": "layer", "eps": 1e-6, "options": []}, "first_blocks": None}
    token = {"kind": "dynamic_token", "eps": 1e-5, "options": [["init", "local"], ["band", None]]}
    arm = {**base, "first_blocks": {"count": 2, "attn": {"before": token, "inner": None}}}
    assert differences(base, arm) == [
        ("first_blocks.count", "none", "2"),
        ("first_blocks.attn.before", "none", "dynamic_token norm (eps 1e-05, init local, band none)"),
    ]
    (row,) = differences(base, {**base, "final_norm": {**base["final_norm"], "kind": "rms"}})
    assert row == ("final_norm", "layer norm (eps 1e-06)", "rms norm (eps 1e-06)")


def test_thumbnails_of_several_sizes_and_kinds():
    pixels = [np.zeros((8, 9)), np.ones((8, 8, 1)), np.full((300, 200, 3), 128), np.ones((8, 8, 5))]
    tiles = thumbnails([("a", image.astype(np.uint8)) for image in pixels])
    assert [tile["uri"][11:15] for tile in tiles] == ["png;", "png;", "jpeg", "png;"]


def test_other_metrics_are_a_table_with_a_row_an_arm(synthetic):
    study = synthetic.make_answer("study", arms=2, evaluations=3)
    loss = Metric("loss", "loss", "loss", unit="", higher_is_better=False)
    arms = [dataclasses.replace(arm, other_metrics={"loss": {0: 0.5, 1: 0.7}}) for arm in study.arms[1:]]
    measured = dataclasses.replace(study, arms=(study.arms[0], *arms), other_metrics={"loss": loss})
    assert [mean(loss, arm) for arm in measured.every_arm] == ["–", "–", loss.shown(0.6)]
    row = '<th scope="row">dpn(<wbr>after=false)</th><td>0.6000</td>'
    page = render(measured)
    assert row in page, "a long name is broken at its punctuation"


@pytest.mark.parametrize("kind", [kind for kind in NORMS if kind != "layer"])
def test_long_words_of_a_drawing_fit_their_boxes(synthetic, kind):
    """A bold letter is up to 0.7 of its size wide, and a box has 100 pixels."""
    arm = synthetic.edited({"mlp": {"before": NormConfig(kind)}})
    drawing = str(draw(arm, synthetic.edited({}), "arm"))
    (style,) = re.findall(rf'<g class="changed"><rect[^>]*><text([^>]*)>{re.escape(NORMS[kind].title)}<', drawing)
    size = re.search(r"font-size: ([\d.]+)px", style)
    assert 0.7 * float(size[1] if size else 11.5) * len(NORMS[kind].title) <= 100


LEGENDS = {  # options of the study -> marks that its plots have, and marks that they do not
    "complete": ({"arms": 2}, ("Band: their range",), ("Arrows point", "Dashed:", "Cross:")),
    "a diverged trial": ({"arms": 2, "diverge": [(1, 0)]}, ("Dashed:", "Cross: diverged"), ("Arrows point",)),
    "one seed": ({"arms": 2, "seeds": 1}, ("Line: mean",), ("Band: their range", "Arrows point")),
    "an arm far outside": ({"arms": 4, "seeds": 5}, ("Arrows point",), ("Dashed:",)),
}


@pytest.mark.parametrize("case", LEGENDS)
def test_legends_name_the_marks_that_plots_have(synthetic, tmp_path, case):
    options, there, missing = LEGENDS[case]
    shown = words_of(write_report(synthetic.make_answer(tmp_path, evaluations=4, **options)).read_text())
    assert all(mark in shown for mark in there)
    assert not any(mark in shown for mark in missing)


def test_an_effect_that_cannot_be_estimated_is_not_plotted(synthetic, tmp_path):
    answer = synthetic.make_answer(tmp_path, arms=2)
    unknown = dict.fromkeys(("effect", "low", "high", "seeds_low", "seeds_high"), math.nan)
    first, second = answer.arms
    first = dataclasses.replace(first, effect=dataclasses.replace(first.effect, **unknown))
    page = Page(synthetic.changed(answer, arms=(first, second)))
    assert all(f"{second.name}: " in plot for plot in page.forests)
    assert not any(f"{first.name}: " in plot for plot in page.forests)
