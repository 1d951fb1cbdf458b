"""A design of a user's own: base and arms under two settings each, in a Latin square instead of all combinations."""

from dataclasses import replace
from typing import ClassVar

from vitmods.study.design import DESIGNS, Design
from vitmods.util.errors import UserError


@DESIGNS.register("latin-square")
class LatinSquare(Design):
    """Of k models and a sweep over k x k settings, each setting trains one model, and each row and column all."""

    name = "latin-square"
    usual_seeds = 2
    excludes: ClassVar = {**Design.excludes, "pilot": "Base alone is no Latin square: leave the pilot out."}
    adds_seeds = False

    @classmethod
    def plan(cls, settings):
        k = len(settings.arms) + 1
        if [len(values) for _, values in settings.sweep.fields] != [k, k]:
            raise UserError(f"A Latin square of {k} models needs a sweep over two fields of {k} values each.")
        return cls()

    def trains(self, settings, setting, arm, seed):
        row, column = place(settings, setting)
        names = [other.name for other in settings.every_arm]
        return (row + column + seed) % len(names) == names.index(arm)

    def questions(self, state, looks, base):
        from vitmods.stats.decide import decide_table
        from vitmods.stats.read import Table
        from vitmods.study.questions import arms_question
        from vitmods.study.tables import criteria_of

        settings, scores, columns = state.settings, {}, {}
        for trial, record in state.answered.items():
            if (score := record.score(settings.measure.name)) is not None:
                row, column = place(settings, trial.setting)
                columns.setdefault(column, []).append(score)
                k = len(settings.every_arm)
                scores.setdefault(trial.arm.name, {})[trial.seed * k + row] = column, score
        means = {column: sum(values) / len(values) for column, values in columns.items()}
        rest = {arm: {b: score - means[c] for b, (c, score) in blocks.items()} for arm, blocks in scores.items()}
        names = [arm.name for arm in settings.every_arm]
        criteria = replace(criteria_of(state, settings.seeds, base), planned=None, generalize="seeds")
        decision = decide_table(Table.of({name: rest.get(name, {}) for name in names}, base), criteria)
        question = replace(
            arms_question(decision),
            scope="over rows and columns",
            methods="Settings were crossed with models in a Latin square.",
        )
        return decision, {"arms": question}


def place(settings, setting):
    """Row and column of a setting."""
    values = setting.to_dict()
    return [options.index(values[name]) for name, options in settings.sweep.fields]
