"""Keys as people write them."""

import pytest

from protofed import methods
from protofed.errors import ProtofedError
from protofed.experiment.general import General, general_keys
from protofed.experiment.settings import hint_for_option, parse_pairs, read_toml, resolve


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


@pytest.mark.parametrize(
    "rule", ["mean?by=size", "mean?by=holders", "mean?by=directions", "median", "trimmed?share=0.2"]
)
def test_a_reduce_is_written_as_a_word_and_survives_toml(rule, tmp_path):
    s = resolve("fedproto", {"reduce": rule})
    name, _, options = rule.partition("?")
    assert s.method.reduce.name == name and s.to_dict()["method"]["reduce"] == rule
    assert not options or str(getattr(s.method.reduce, options.split("=")[0])) == options.split("=")[1]
    (tmp_path / "s.toml").write_text(s.to_toml())
    assert resolve(None, read_toml(tmp_path / "s.toml")) == s


def test_a_reduce_that_the_method_fixes_or_that_makes_no_sense_is_refused_in_a_line():
    with pytest.raises(
        ProtofedError,
        match=r"the reduce of fedapa is fixed .* \(it needs each upload by itself\); it is a setting of .*fedproto",
    ):
        resolve("fedapa", {"reduce": "median"})
    with pytest.raises(ProtofedError, match="by=directions is for prototypes, and fedavg exchanges weights"):
        resolve("fedavg", {"reduce": "mean?by=directions"})


def test_a_loss_weight_is_a_number_or_a_schedule(tmp_path):
    ramp = {"shape": "linear", "start": 2, "end": 4, "maximum": 3.0}
    number, schedule = resolve("fedproto", {"weight": 2}), resolve("fedproto", {"weight": ramp})
    assert number.method.weight == 2.0 and schedule.method.weight(3) == 1.5
    for s in (number, schedule):
        (tmp_path / "s.toml").write_text(s.to_toml())
        assert resolve(None, read_toml(tmp_path / "s.toml")) == s


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("mlp?embedding=32", {"name": "mlp", "embedding": 32}),
        ("mlp?hidden=64&embedding=16", {"name": "mlp", "hidden": [64], "embedding": 16}),
        ("bert:minilm?trainable_layers=2", {"name": "bert", "path": "minilm", "trainable_layers": 2}),
        ("resnet18", {"name": "resnet18"}),
        ("mlp?hidden=[64,32]", {"name": "mlp", "hidden": [64, 32]}),
        ("mlp?hidden=64,32&embedding=16", {"name": "mlp", "hidden": [64, 32], "embedding": 16}),
    ],
)
def test_a_model_with_its_settings_in_one_word(written, meant):
    assert resolve("fedsap", {"model": written}) == resolve("fedsap", {"model": meant})


def test_a_key_goes_over_the_model_word():
    assert resolve("fedsap", {"model": "mlp?embedding=32", "embedding": 8}).model.embedding == 8


def test_several_models_stand_in_place_of_one(tmp_path):
    words = parse_pairs(["models=cnn,mlp?embedding=32", "capability=1,2.5", "assignment=capability", "dim=32"])
    s = resolve("fedproto", words)
    assert s.general.models == ("cnn", "mlp?embedding=32") and s.general.capability == (1.0, 2.5)
    assert resolve("fedproto", {**words, "models": ["cnn", "mlp?embedding=32"]}) == s
    assert parse_pairs(['models=["mlp?hidden=64,32", "cnn"]'])["models"] == ["mlp?hidden=64,32", "cnn"]
    assert "model" not in s.to_dict()
    (tmp_path / "s.toml").write_text(s.to_toml())
    assert resolve(None, read_toml(tmp_path / "s.toml")) == s


def test_one_model_or_capability_is_a_list_of_one():
    g = resolve("fedproto", parse_pairs(["models=mlp", "capability=3"])).general
    assert g.models == ("mlp",) and g.capability == (3.0,)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a.csv", "table"),
        ("a.TSV", "table"),
        ("b/a.jsonl", "text"),
        ("a.csv.gz", "table"),
        ("a.parquet", "table"),
        ("a.npz", "npz"),
        ("a.npy", "npy"),
        ("hub:owner/set", "hub"),
    ],
)
def test_a_file_in_place_of_a_data_sets_name(file, name):
    data = resolve("fedproto", {"data": file}).data
    assert (data.name, data.path) == (name, file.removeprefix("hub:"))


def test_what_the_federation_and_the_data_both_have():
    s = resolve("fedproto", {"data": "a.csv", "test_share": 0.4, "data.test_share": 0.1})
    assert s.general.test_share == 0.4 and s.data.test_share == 0.1


def test_engine_words_for_each_architecture():
    g = resolve("fedproto", parse_pairs(["models=cnn,mlp", "inner=loop,stack", "layout=contiguous"])).general
    assert g.inner == ("loop", "stack") and g.layout == "contiguous"


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
        ({"alignment.start": 200}, ["alignment", "end=100 lies before start=200"]),
        ({"reduce": "medien"}, ["medien", "did you mean 'median'"]),
        ({"reduce": "trimmed?shar=0.2"}, ["shar", "did you mean 'share'"]),
        ({"reduce": "trimmed?share=0.7"}, ["share", "below 0.5"]),
        ({"reduce": "trimmed?share"}, ["trimmed?share", "key=value"]),
        ({"feed": "paired"}, ["feed"]),
        ({"scale": -1}, ["scale"]),
        ({"scale": "big"}, ["scale", "number"]),
        ({"model": "resnet18?"}, ["resnet18?", "key=value"]),
        ({"model": "mlp?embedding"}, ["mlp?embedding", "key=value", "'embedding'"]),
        ({"model": "mlp?embeding=3"}, ["embeding", "did you mean 'embedding'"]),
        ({"models": ["cnn", "mpl"]}, ["mpl", "did you mean 'mlp'"]),
        ({"models": ["cnn"], "model.embedding": 3}, ["model.embedding", "models=cnn"]),
        ({"models": ["cnn"], "embedding": 3}, ["embedding"]),
        ({"assignment": "capable"}, ["assignment", "capability"]),
        ({"capability": "strong"}, ["capability", "number"]),
        ({"projection": "square"}, ["projection", "consensus"]),
        ({"projection_dropout": 1}, ["projection_dropout"]),
        ({"dim": -1}, ["dim"]),
        ({"choice": "best"}, ["choice", "diverse"]),
        ({"candidates": "some"}, ["candidates", "own"]),
        ({"models": ["cnn", "mlp"], "inner": ["loop", "stak"]}, ["inner", "stack"]),
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


# --- groups -----------------------------------------------------------------------------------------------------------
ORDER = """rounds clients participation choice new_clients seed epochs batch optimiser lr momentum weight_decay
nesterov lr_schedule smoothing clip keep_optimiser shared_optimiser gradients precision
initial models assignment capability projection
dim projection_dropout train features test test_share scope validation_share labels labels_per_class server_labels
server_label_noise unlabelled_limit unlabelled open_share shift unseen
classes_appear classes_vanish attack filters privacy guard secure control
augmentation flip crop randaugment randaugment_scale randaugment_pool cutout start_from track silhouette
score_prototypes embedding_measures snapshots evaluate_every candidates ensemble checkpoint_every keep_models device
engine inner layout convolution workers threads"""


def test_general_keys_have_an_order_a_default_and_a_description():
    keys = general_keys()
    assert list(keys) == ORDER.split() == [key for key in resolve("fedavg", {}).to_dict() if key in keys]
    assert all(getattr(General(), key) == known.default for key, known in keys.items())
    assert all(len(known.description) > 5 for known in keys.values())


def test_a_group_has_the_keys_of_the_run():
    s = resolve("fedavg", {"rounds": 7, "lr": 0.5, "crop": 0.25, "workers": 3})
    assert (s.local.rounds, s.local.lr, s.local.momentum) == (7, 0.5, 0.5)
    assert s.augmentation.crop == 0.25 and s.engine.workers == 3 and s.engine.engine == "auto"
    assert s.with_engine(s.engine) == s and s.with_general(lr=0.1).general.lr == 0.1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nesterov": True, "optimiser": "adam"}, "nesterov=true needs optimiser=sgd"),
        ({"crop": 0.7}, "crop=0.7; expected a share of the side from 0 to 0.5"),
        ({"randaugment": [2, 31]}, "randaugment"),
        ({"lr": 0}, "settings: lr=0: Input should be greater than 0"),
        ({"workers": 513}, "settings: workers=513"),
        ({"capability": [1, 0]}, "capability.1=0"),
    ],
)
def test_the_check_of_a_group_is_made_before_anything_runs(given, said):
    with pytest.raises(ProtofedError) as error:
        resolve("fedavg", given)
    assert said in str(error.value)


# --- hints ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("fedavg", {"scale": 16}, r"unknown setting 'scale' here: it is a setting of .*fedsap.*, not of fedavg"),
        (
            "fedavg",
            {"alignment.shape": "cosine"},
            r"'alignment.shape' here: it is a setting of .*fedsap.*, not of fedavg",
        ),
        (
            "fedavg",
            {"alpha": 0.1},
            r"unknown setting 'alpha' here: .*it needs partition=dirichlet, .* and partition is n-way",
        ),
        ("fedavg", {"partition": "iid", "way": 3}, r"it needs partition=n-way, and partition is iid"),
        ("fedavg", {"widen": 3}, r"it needs model=wideresnet, and model is auto"),
        (
            "fedavg",
            {"models": ["cnn", "mlp"], "embedding": 3},
            r"each of several models has its own: models=\w+\?embedding=…",
        ),
        ("fedavg", {"manifest": "x.csv"}, r"it needs data=csi, and data is digits"),
        ("fedavg", {"path": "x"}, r"it needs data=cifar10, .* and \d+ more, and data is digits"),
    ],
)
def test_a_key_of_another_choice_is_told_whose_it_is(method, given, said):
    with pytest.raises(ProtofedError, match=said) as error:
        resolve(method, given)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_an_unknown_key_gets_the_nearest_three_and_no_long_list():
    with pytest.raises(ProtofedError) as error:
        resolve("fedavg", {"server_label": 3})
    text = str(error.value)
    assert text.startswith("unknown setting 'server_label'; did you mean 'server_labels' or ")
    assert text.endswith("`protofed settings` lists the general ones") and len(text) < 200 and text.count(" or ") <= 2
    with pytest.raises(ProtofedError, match=r"^unknown setting 'qqqq'; `protofed settings` lists the general ones$"):
        resolve("fedavg", {"qqqq": 3})


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--rounds", "rounds=VALUE"),
        ("--rounds=3", "rounds=3"),
        ("-rounds", "rounds=VALUE"),
        ("--lr-schedule", "lr_schedule=VALUE"),
        ("--alpha=0.1", "alpha=0.1"),
        ("--fedsap.scale=8", "fedsap.scale=8"),
        ("--partition", "partition=VALUE"),
        ("--out", None),
        ("--qqqq", None),
        ("--", None),
        ("", None),
    ],
)
def test_an_option_that_is_a_setting(option, said):
    hint = hint_for_option(option)
    assert hint == (None if said is None else f"settings have no dashes: write {said}")
