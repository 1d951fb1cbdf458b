import numpy as np
import pytest

from vitmods.stats.width import nadeau_bengio_variance


def test_the_formula():
    values = [0.1, 0.4, 0.2, 0.5, 0.3]
    assert nadeau_bengio_variance(values, 20, 80) == pytest.approx(0.025 * (1 / 5 + 1 / 4))
    sizes = ([20, 20, 20, 20, 19], [79, 79, 79, 79, 80])
    assert nadeau_bengio_variance(values, *sizes) == pytest.approx(0.025 * (1 / 5 + 99 / 396))
    assert nadeau_bengio_variance([values, [1.0] * 5], 1, 4).tolist() == pytest.approx([0.025 * 0.45, 0.0])
    assert np.isnan(nadeau_bengio_variance([0.1], 20, 80))


@pytest.mark.parametrize(("n_test", "n_train", "parts"), [(1, 4, 5), (1, 9, 10), (10, 90, 15)])
def test_it_is_right_where_parts_resemble_each_other_as_it_assumes(n_test, n_train, parts):
    rng, rho, studies = np.random.default_rng(0), n_test / (n_test + n_train), 40_000
    shared, own = rng.normal(size=(studies, 1)), rng.normal(size=(studies, parts))
    values = np.sqrt(rho) * shared + np.sqrt(1 - rho) * own
    true = values.mean(axis=1).var()
    assert nadeau_bengio_variance(values, n_test, n_train).mean() == pytest.approx(true, rel=0.03)
    assert values.var(axis=1, ddof=1).mean() / parts < 0.7 * true


@pytest.mark.parametrize("sizes", [(0, 4), (1, 0), (-1, 4)])
def test_parts_have_images(sizes):
    with pytest.raises(ValueError, match="above 0"):
        nadeau_bengio_variance([0.1, 0.2], *sizes)
