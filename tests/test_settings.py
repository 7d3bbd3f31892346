"""Keys as people write them."""

import pytest

from protofed import methods
from protofed.errors import ProtofedError
from protofed.experiment.settings import parse_pairs, read_toml, resolve


def test_defaults_are_fedsaps_and_complete():
    s = resolve("fedsap", {})
    g = s.general
    assert (g.clients, g.rounds, g.epochs, g.batch, g.optimiser) == (20, 100, 1, 8, "sgd")
    assert (g.lr, g.momentum, g.participation, g.seed) == (0.01, 0.5, 1.0, 1234)
    assert s.method.scale == 32 and s.method.alignment(60) == pytest.approx(0.35)


def test_short_full_and_named_keys_agree():
    short = resolve("fedsap", {"scale": 16, "way": 4, "embedding": 32, "model": "mlp"})
    full = resolve("fedsap", {"method.scale": 16, "partition.way": 4, "model": {"name": "mlp", "embedding": 32}})
    named = resolve(
        "fedsap", {"fedsap.scale": 16, "partition": {"name": "n-way", "way": 4}, "model": "mlp", "embedding": 32}
    )
    assert short == full == named


def test_a_nested_setting_given_in_part_keeps_the_rest():
    ramp = resolve("fedsap", {"alignment.shape": "cosine"}).method.alignment
    assert (ramp.shape, ramp.start, ramp.end, ramp.maximum) == ("cosine", 20, 100, 0.7)


def test_pairs_are_typed():
    given = parse_pairs(["rounds=20", "lr=0.5", "proxy=false", "data=a/b.npz", "hidden=10,20", "name=x=y"])
    assert given == {"rounds": 20, "lr": 0.5, "proxy": False, "data": "a/b.npz", "hidden": [10, 20], "name": "x=y"}


def test_settings_survive_toml(tmp_path):
    s = resolve("fedsap", {"alignment.shape": "step", "model": "cnn", "channels": [4, 8], "partition": "dirichlet"})
    (tmp_path / "s.toml").write_text(s.to_toml())
    assert resolve(None, read_toml(tmp_path / "s.toml")) == s


def test_keys_of_other_compared_methods_are_passed_over():
    s = resolve("fedproto", {"scale": 16, "fedsap.proxy": False, "weight": 2.0}, also=["fedsap", "fedproto"])
    assert s.method == methods.get("fedproto", weight=2.0)
    with pytest.raises(ProtofedError, match="unknown setting 'scale'"):
        resolve("fedproto", {"scale": 16})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"roundz": 3}, ["roundz", "did you mean 'rounds'"]),
        ({"rounds": 0}, ["rounds", "greater than or equal to 1"]),
        ({"rounds": "many"}, ["rounds", "integer"]),
        ({"participation": 1.5}, ["participation"]),
        ({"optimiser": "sdg"}, ["optimiser", "sgd"]),
        ({"data": "digitz"}, ["digitz", "did you mean 'digits'"]),
        ({"partition": "dirichle"}, ["did you mean 'dirichlet'"]),
        ({"model": "cn"}, ["did you mean 'cnn'"]),
        ({"method.scal": 3}, ["scal", "did you mean 'scale'"]),
        ({"alignment.shap": "cosine"}, ["shap", "did you mean 'shape'"]),
        ({"alignment.shape": "cosin"}, ["cosin", "cosine"]),
        ({"alignment.start": 200}, ["start"]),
        ({"scale": -1}, ["scale"]),
        ({"scale": "big"}, ["scale", "number"]),
        ({"partition.way": -2}, ["way"]),
        ({"partition": "dirichlet", "alpha": 0}, ["alpha"]),
    ],
)
def test_bad_settings_are_one_line_that_names_the_key(given, words):
    with pytest.raises(ProtofedError) as error:
        resolve("fedsap", given)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_unknown_method_gets_the_nearest_spelling():
    with pytest.raises(ProtofedError, match="did you mean 'fedsap'"):
        resolve("fedsapp", {})


@pytest.mark.parametrize("pair", ["rounds", "=3"])
def test_not_a_pair(pair):
    with pytest.raises(ProtofedError, match="key=value"):
        parse_pairs([pair])
