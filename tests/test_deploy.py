"""Sites elsewhere: what they compute is what a simulation computes, and what goes wrong at one of them stays there."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from protofed import PrototypeBank, wire
from protofed.data import Dataset
from protofed.deploy.cards import Card, agreed_classes, check_shapes
from protofed.deploy.node import Node, RoundStates, site_data
from protofed.deploy.policy import Policy, Refusal
from protofed.deploy.remote import Limits
from protofed.deploy.serve import PLAIN, read_begun, serve
from protofed.deploy.transport import LocalTransport
from protofed.errors import ProtofedError, Stopped
from protofed.experiment.build import engine_inputs, make_federation
from protofed.experiment.settings import resolve
from protofed.federation.checkpoint import rounds_in
from protofed.federation.site import opened, sealed
from protofed.privacy import accountant
from protofed.results.read import read_folder
from support.marks import slow_but
from support.small import blobs

NAMES = ("north", "south", "west")
MODELS = ("mlp?hidden=7&embedding=5", "mlp?hidden=5&embedding=4", "mlp?hidden=3&embedding=6")
KEYS = {"rounds": 4, "batch": 4, "dim": 6, "projection_dropout": 0.0, "checkpoint_every": 1, "seed": 7, "snapshots": 1}
METHODS = {
    "fedavg": {},
    "fedproto": {},
    "fedsap": {},
    "fedpagr": {},
    "fedapa": {},
    "constellation": {"method.width": 8},
    "protofssl": {"labels": "client", "labels_per_class": 4},
}
QUICK = Limits(seconds=20, quorum=3, patience=20)


def part(which: int, **more) -> Dataset:
    """The data of one site: its own samples of some of four classes."""
    whole = blobs(per_class=30, seed=which)
    rows = torch.tensor([c != which for c in whole.y_train.tolist()])
    tests = torch.tensor([c != which for c in whole.y_test.tolist()])
    return replace(
        whole,
        x_train=whole.x_train[rows],
        y_train=whole.y_train[rows],
        x_test=whole.x_test[tests],
        y_test=whole.y_test[tests],
        **more,
    )


@pytest.fixture
def nodes(tmp_path):
    def make(policies=(None, None, None)):
        return {name: Node(name, tmp_path / name, part(k), MODELS[k], policies[k]) for k, name in enumerate(NAMES)}

    return make


def run_of(site, run="run"):
    """What a site keeps of a run."""
    [place] = (site / "runs").glob(f"{run}-*")
    return place


class Restarting:
    """A site whose process ends after every message: what it knows is in its folder."""

    def __init__(self, folder, which):
        self.folder, self.which = folder, which

    def handle(self, function, message):
        node = Node(NAMES[self.which], self.folder / NAMES[self.which], part(self.which), MODELS[self.which])
        return node.handle(function, message)


def simulated(method, given):
    """The federation of the same sites in one process."""
    cards = [Node(n, given["folder"] / n, part(k), MODELS[k]).card() for k, n in enumerate(NAMES)]
    more = {"clients": 3, "models": list(MODELS), "assignment": "round-robin", "data": part(0)}
    more |= {key: value for key, value in given.items() if key != "folder"}
    settings = resolve(method, {**KEYS, **METHODS[method], **more})
    views = [site_data(part(k), settings, cards, k, (), 4) for k in range(3)]
    held_back = [view.held_back[k] for k, view in enumerate(views)]
    data = replace(views[0], clients=[view.clients[k] for k, view in enumerate(views)], held_back=held_back)
    settings, inputs, names = engine_inputs(settings, data)
    return make_federation(settings.with_engine(PLAIN), inputs.engine(PLAIN), inputs, names)


def without_clock(rows):
    """Rows without seconds, and without the silhouette of all clients together, for which sites send no embeddings."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "pooled_silhouette")} for row in rows]


@pytest.mark.parametrize("method", slow_but("fedproto", METHODS))
def test_sites_of_three_architectures_give_the_bits_of_a_simulation(method, tmp_path):
    """Every site is started anew for every message."""
    transport = LocalTransport({name: Restarting(tmp_path, k) for k, name in enumerate(NAMES)})
    result = serve(method, {**KEYS, **METHODS[method]}, transport, NAMES, tmp_path / "run", limits=QUICK)
    loop = simulated(method, {"folder": tmp_path / "simulated"})
    records = list(loop)
    [run] = read_folder(tmp_path / "run").runs
    for record, row, clients in zip(records, run.rounds, run.clients, strict=True):
        assert row["terms"] == json.loads(json.dumps(record.terms)) and row["dropped"] == {}
        assert row["up"] == {k: record.up[k] for k in row["up"]} and row["down"] == {
            k: record.down[k] for k in row["down"]
        }
        for kind in ("accuracy_head", "accuracy_prototype"):
            assert kind not in record.metrics or clients[kind] == [getattr(s, kind) for s in record.scores]
    assert result.summary["clients"] == 3 and result.failure is None
    for client, state in loop.engine.export().items():
        states = RoundStates(run_of(tmp_path / NAMES[client]), client)
        states.round = 5
        stored = states[client].weights if client in states else {}
        assert stored.keys() == state.weights.keys()
        assert all(torch.equal(stored[name], value) for name, value in state.weights.items())


@pytest.mark.parametrize("method", ["fedproto", "fedsap"])
def test_a_site_keeps_what_the_run_gave_it(method, nodes, tmp_path):
    serve(method, KEYS, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK)
    for name in NAMES:
        place = run_of(tmp_path / name)
        assert {"model.safetensors", "prototypes.safetensors", "classifier.safetensors", "README.md", "begin.json"} <= {
            file.name for file in place.iterdir()
        }
        assert "after round 4" in (place / "README.md").read_text()
        # those that a resumed server may go back to, while its next checkpoint is written beside a round
        assert len(list(place.glob("round-*.safetensors"))) <= 4


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_a_site_ends_with_a_classifier(method, tmp_path, call):
    def own(which):  # without a test part, so that rows are held out, and in a scale that must be undone
        x, names = part(which).x_train * 7 + 100, ("ash", "beech", "cedar", "fir")
        return replace(part(which), x_train=x, x_test=None, y_test=None, class_names=names).standardised()

    sites = {name: Node(name, tmp_path / name, own(k), MODELS[k]) for k, name in enumerate(NAMES)}
    serve(method, KEYS, LocalTransport(sites), NAMES, tmp_path / "run", limits=QUICK)
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    for k, name in enumerate(NAMES):
        place = run_of(tmp_path / name)
        site, _, _ = sites[name].runs[place.name]
        mean, std = site.engine.data.scaling(k)
        x, y = site.engine.data.clients[k].test.take()
        np.savez(tmp_path / "new.npz", x=(x * std + mean).numpy(), y=y.numpy())
        right = f"{row['accuracy_head'][k]:.1%} right"
        code, out, _ = call("predict", place, tmp_path / "new.npz", "--by", "head", "--client", name)
        assert code == 0 and f"{len(y)} samples by {name} (head); {right}" in out
        assert f"protofed predict {place} new.csv" in (place / "README.md").read_text()
    code, _, err = call("predict", place, tmp_path / "new.npz", "--client", "north")
    assert code == 2 and "unknown client 'north'. Known: west" in err
    code, out, _ = call("export", place, "--out", tmp_path / "model.safetensors")
    assert code == 0 and "the same bits as ours" in out and (tmp_path / "model.md").is_file()


def test_other_data_is_refused_at_the_server_and_at_a_site(nodes, tmp_path):
    def stop(record, rounds):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        serve("fedproto", KEYS, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK, watch=stop)
    with pytest.raises(ProtofedError, match="the data is not what the run began with"):
        serve(None, {}, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK, data=part(1))
    sites = nodes()
    sites["south"] = Node("south", tmp_path / "south", part(2), MODELS[1])
    serve(None, {}, LocalTransport(sites), NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2))
    [run] = read_folder(tmp_path / "run").runs
    assert [row["dropped"].get("1") for row in run.rounds[2:]] == [
        "south: this site's data is not what the run began with here"
    ] * 2


def test_a_server_killed_before_its_first_round_knows_its_sites(nodes, tmp_path):
    """Who the sites are, and by what name they know the run, is in the folder from the moment it is there."""

    def stop(record, rounds):
        name, cards = read_begun(tmp_path / "run")
        assert record.round == 1 and name.startswith("run-") and [card.name for card in cards] == list(NAMES)
        raise KeyboardInterrupt

    with pytest.raises(Stopped):
        serve("fedproto", KEYS, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK, watch=stop)
    serve(None, {}, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK)
    assert run_of(tmp_path / "north").name == read_begun(tmp_path / "run")[0]


def test_names_of_sites_stand_in_the_results(nodes, tmp_path):
    serve("fedproto", KEYS, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK)
    [run] = read_folder(tmp_path / "run").runs
    assert list(run.confusions().clients) == list(NAMES)
    assert [card.name for card in read_begun(tmp_path / "run")[1]] == list(NAMES)


@pytest.mark.parametrize("method", ["fedproto", "fedavg", "fedapa", "constellation"])
@pytest.mark.parametrize("kept", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_a_server_that_was_stopped_goes_on_with_the_same_bits(method, kept, nodes, tmp_path):
    keys = {**KEYS, "rounds": 7, "checkpoint_every": kept}
    whole = serve(method, keys, LocalTransport(nodes()), NAMES, tmp_path / "whole", limits=QUICK)

    def stop(record, rounds):
        if record.round == 5:
            raise KeyboardInterrupt

    with pytest.raises(Stopped):
        serve(method, keys, LocalTransport(nodes()), NAMES, tmp_path / "cut", limits=QUICK, watch=stop)
    cut = serve(None, {}, LocalTransport(nodes()), NAMES, tmp_path / "cut", limits=QUICK)
    assert without_clock(cut.metrics) == without_clock(whole.metrics)
    for name in NAMES:
        for file in ("model.safetensors", "classifier.safetensors"):
            one, other = (run_of(tmp_path / name, run) / file for run in ("whole", "cut"))
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_a_site_that_is_cut_off_for_two_rounds_comes_back(nodes, tmp_path):
    transport = LocalTransport(nodes())

    def cut(record, rounds):
        transport.lost = {"south": "its link is down"} if record.round in (1, 2) else {}

    keys = {**KEYS, "rounds": 5}
    result = serve("fedproto", keys, transport, NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2), watch=cut)
    [run] = read_folder(tmp_path / "run").runs
    assert [list(row["dropped"]) for row in run.rounds] == [[], ["1"], ["1"], [], []]
    assert run.rounds[1]["dropped"]["1"] == "south: its link is down"
    assert [row["accuracy_head"][1] is None for row in run.clients] == [False, True, True, False, False]
    assert result.summary["rounds"] == 5 and result.summary["dropped_clients"] == 2


@pytest.mark.slow
def test_a_slow_site_is_left_out(nodes, tmp_path):
    transport = LocalTransport(nodes())
    transport.delays = {"west": 0.0}

    def slow(record, rounds):
        transport.delays = {"west": 3.0} if record.round == 1 else {}

    limits = Limits(seconds=1.0, quorum=2, patience=20)
    serve("fedproto", {**KEYS, "rounds": 4}, transport, NAMES, tmp_path / "run", limits=limits, watch=slow)
    [run] = read_folder(tmp_path / "run").runs
    assert "no answer within 1 s" in run.rounds[1]["dropped"]["2"]
    assert run.rounds[3]["dropped"] == {}


@pytest.mark.slow
def test_a_round_without_a_quorum_changes_nothing(nodes, tmp_path):
    class Moody(LocalTransport):
        def call(self, function, messages, timeout):
            header = opened(next(iter(messages.values())), "x")[0]
            self.lost = {"north": "away", "south": "away"} if function == "train" and header["round"] == 2 else {}
            return super().call(function, messages, timeout)

        def sites(self):
            return list(NAMES)

    serve(
        "fedavg",
        {**KEYS, "models": None} and KEYS,
        Moody(nodes()),
        NAMES,
        tmp_path / "run",
        limits=replace(QUICK, quorum=2),
    )
    [run] = read_folder(tmp_path / "run").runs
    assert set(run.rounds[1]["dropped"]) == {"0", "1", "2"}
    assert "1 of the 2 sites that make a round" in run.rounds[1]["dropped"]["2"]
    assert run.rounds[2]["dropped"] == {}


NONSENSE = {
    "nothing": b"",
    "random": np.random.default_rng(0).bytes(10_000),
    "cut": b"\x10\x00\x00\x00{",
    "a former round": sealed({"round": 1, "terms": {}, "pseudo": {}, "failure": "", "returned": True}, b""),
    "no reply": sealed({"hello": 1}, b"xyz"),
    "not a bundle": sealed({"round": 2, "terms": {}, "pseudo": {}, "failure": "", "returned": True}, b"\x00" * 999),
}


@pytest.mark.parametrize("case", NONSENSE)
@pytest.mark.slow
def test_nonsense_from_a_site_drops_that_site_alone(case, nodes, tmp_path):
    class Liar:
        def __init__(self, node):
            self.node = node

        def handle(self, function, message):
            if function == "train" and opened(message, "x")[0]["round"] == 2:
                return NONSENSE[case]
            return self.node.handle(function, message)

    sites = nodes()
    transport = LocalTransport({**sites, "south": Liar(sites["south"])})
    result = serve(
        "fedproto", {**KEYS, "rounds": 3}, transport, NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2)
    )
    [run] = read_folder(tmp_path / "run").runs
    assert [list(row["dropped"]) for row in run.rounds] == [[], ["1"], []]
    assert "\n" not in run.rounds[1]["dropped"]["1"] and result.summary["rounds"] == 3


HARMFUL = {
    "NaN": (lambda bank: PrototypeBank(bank.means * float("nan"), bank.counts), True),
    "wrong shapes": (lambda bank: PrototypeBank(bank.means[:, :-1], bank.counts), True),
    "1e30": (lambda bank: PrototypeBank(bank.means * 0 + 1e30, bank.counts), False),
}


@pytest.mark.parametrize("case", HARMFUL)
@pytest.mark.slow
def test_a_harmful_upload_does_not_end_the_run(case, nodes, tmp_path):
    """What cannot be right is dropped. What is finite and has the right shape is not noticed yet; the run goes on."""
    change, refused = HARMFUL[case]

    class Harmful:
        def __init__(self, node):
            self.node = node

        def handle(self, function, message):
            reply = self.node.handle(function, message)
            if function != "train" or opened(message, "x")[0]["round"] != 2:
                return reply
            header, payload = opened(reply, "x")
            bundle = wire.decode(payload, "x")
            return sealed(header, wire.encode(replace(bundle, bank=change(bundle.bank))))

    sites = nodes()
    transport = LocalTransport({**sites, "south": Harmful(sites["south"])})
    keys, limits = {**KEYS, "rounds": 3}, replace(QUICK, quorum=2)
    result = serve("fedproto", keys, transport, NAMES, tmp_path / "run", limits=limits)
    [run] = read_folder(tmp_path / "run").runs
    assert result.summary["rounds"] == 3 and len(run.rounds) == 3
    if refused:
        assert list(run.rounds[1]["dropped"]) == ["1"] and run.rounds[1]["dropped"]["1"].startswith("south: ")
        assert run.rounds[2]["dropped"] == {}


@pytest.mark.parametrize(
    "message", [b"", b"\xff" * 50, sealed({}, b""), sealed({"run": "../../x"}, b""), sealed({"run": "r"}, b"")]
)
@pytest.mark.parametrize("function", ["begin", "train", "evaluate", "eval"])
def test_nonsense_from_the_server_is_refused_in_one_line(function, message, nodes):
    with pytest.raises(ProtofedError) as error:
        nodes()["north"].handle(function, message)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_message_that_was_held_up_does_not_undo_newer_rounds(nodes, tmp_path):
    sent = []

    class Recording(LocalTransport):
        def call(self, function, messages, timeout):
            sent.append((function, messages["south"]))
            return super().call(function, messages, timeout)

    sites = nodes()
    serve("fedproto", KEYS, Recording(sites), NAMES, tmp_path / "run", limits=QUICK)
    place = run_of(tmp_path / "south")
    kept = {file.name: file.read_bytes() for file in place.iterdir()}
    old = [(f, m) for f, m in sent if f in ("train", "evaluate")][:-1]
    assert len(old) >= 7
    for function, message in old:
        with pytest.raises(Refusal, match="out of date"):
            sites["south"].handle(function, message)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == kept


# --- policy -----------------------------------------------------------------------------------------------------------
def test_a_policy_is_a_file_that_the_server_cannot_override(tmp_path):
    (tmp_path / "policy.toml").write_text('methods = ["fedproto"]\nkinds = ["prototypes"]\nmin_samples = 5\n')
    policy = Policy.read(tmp_path / "policy.toml")
    assert policy == Policy(("fedproto",), ("prototypes",), 5)
    for text, said in (
        ("minsamples = 3", "unknown key 'minsamples'"),
        ("min_samples = 'x'", "min_samples"),
        ("a", "not readable"),
    ):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ProtofedError, match=said):
            Policy.read(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("method", "policy", "said"),
    [
        ("fedavg", Policy(methods=("fedproto",)), "does not allow the method fedavg"),
        ("fedavg", Policy(kinds=("prototypes",)), "does not let weights leave"),
        ("fedproto", Policy(kinds=("weights",)), "does not let prototypes leave"),
        ("fedproto", Policy(max_rounds=3), "allows 3 rounds, and the run has 4"),
        ("fedproto", Policy(epsilon=4.0), "asks for differential privacy"),
    ],
)
@pytest.mark.slow
def test_what_a_policy_refuses_is_answered_with_the_reason(method, policy, said, nodes, tmp_path):
    transport = LocalTransport(nodes((None, policy, None)))
    serve(method, KEYS, transport, NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2))
    [run] = read_folder(tmp_path / "run").runs
    assert all(list(row["dropped"]) == ["1"] and said in row["dropped"]["1"] for row in run.rounds)


def test_prototypes_of_few_samples_do_not_leave(nodes, tmp_path):
    node = nodes((Policy(min_samples=10_000), None, None))
    serve("fedproto", {**KEYS, "rounds": 1}, LocalTransport(node), NAMES, tmp_path / "run", limits=QUICK)
    counts = load_file(rounds_in(tmp_path / "run" / "checkpoint")[0] / "server.safetensors")["/bank/counts"]
    others = [part(k).y_train.bincount(minlength=4) for k in (1, 2)]
    assert torch.equal(counts, sum(others).to(counts.dtype))


def test_a_site_keeps_its_own_account_of_privacy_over_all_runs(nodes, tmp_path):
    """The budget is the site's, and not the server's: two runs that each keep within theirs spend it together."""
    noise = 4.0
    allowed = accountant.releases_within(3.0, noise, 1e-5, 100)
    policy = Policy(epsilon=3.0)
    keys = {**KEYS, "rounds": allowed - 2, "privacy": f"client?noise={noise}&placement=local"}
    sites = nodes((None, policy, None))
    for name in ("one", "two"):
        limits = replace(QUICK, quorum=2)
        serve("fedproto", keys, LocalTransport(sites), NAMES, tmp_path / name, limits=limits)
    first, second = (read_folder(tmp_path / name).runs[0].rounds for name in ("one", "two"))
    assert not any(row["dropped"] for row in first) and len(first) == allowed - 2
    assert [list(row["dropped"]) for row in second] == [[], []] + [["1"]] * (allowed - 4)
    assert "this site's privacy budget is spent" in second[-1]["dropped"]["1"]
    assert sites["south"].ledger.epsilon(1e-5) == pytest.approx(accountant.epsilon(noise, allowed, 1e-5))
    assert all(
        row["terms"] == {} and row["loss"] is None for row in first
    )  # no loss leaves a site, for it has no noise


def test_a_site_that_does_not_trust_the_server_adds_the_noise_itself(nodes, tmp_path):
    transport = LocalTransport(nodes((None, Policy(trust_server=False), None)))
    keys = {**KEYS, "rounds": 2, "privacy": "client?noise=1"}
    serve("fedproto", keys, transport, NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2))
    [run] = read_folder(tmp_path / "run").runs
    assert all("does not trust the server" in row["dropped"]["1"] for row in run.rounds)


def test_noise_of_sites_does_not_follow_from_the_seed(nodes, tmp_path):
    keys = {**KEYS, "rounds": 1, "privacy": "client?noise=0.1&placement=local"}
    states = []
    for name in ("one", "two"):
        serve("fedproto", keys, LocalTransport(nodes()), NAMES, tmp_path / name, limits=QUICK)
        states.append(load_file(rounds_in(tmp_path / name / "checkpoint")[0] / "server.safetensors")["/bank/means"])
    assert not torch.equal(*states)


def test_a_refusal_that_leaves_no_quorum_ends_the_run(nodes, tmp_path):
    transport = LocalTransport(nodes((None, Policy(methods=("fedavg",)), None)))
    with pytest.raises(ProtofedError, match=r"2 sites would take part, and 3 make a round \(south: this site's policy"):
        serve("fedproto", KEYS, transport, NAMES, tmp_path / "run", limits=QUICK)


def test_a_new_run_in_a_folder_of_the_same_name_has_its_own_settings(nodes, tmp_path):
    for rate, place in ((0.01, "one"), (0.5, "two")):
        serve(
            "fedproto",
            {**KEYS, "rounds": 1, "lr": rate},
            LocalTransport(nodes()),
            NAMES,
            tmp_path / place / "run",
            limits=QUICK,
        )
    rates = [json.loads(f.read_text())["settings"]["lr"] for f in (tmp_path / "north" / "runs").glob("*/begin.json")]
    assert sorted(rates) == [0.01, 0.5]


def test_embeddings_of_samples_leave_only_where_the_policy_lets_them(nodes, tmp_path):
    policies = (Policy(embeddings=True), None, None)
    serve("fedproto", KEYS, LocalTransport(nodes(policies)), NAMES, tmp_path / "run", limits=QUICK)
    [file] = (tmp_path / "run" / "snapshots").iterdir()
    assert set(np.load(file)["client"].tolist()) == {0}


def test_measures_of_embeddings_leave_and_embeddings_do_not(nodes, tmp_path):
    keys = {**KEYS, "embedding_measures": True}
    summary = serve("fedproto", keys, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK).summary
    assert {"map", "auroc_head", "ece_prototype", "worst_head"} <= summary["last_five"].keys()
    assert "pooled_map" not in summary["last_five"] and len(summary["per_client"]["map"]) == len(NAMES)


def test_a_site_that_is_not_evaluated_has_its_model_too(nodes, tmp_path):
    transport = LocalTransport(nodes((Policy(measures=False), None, None)))
    serve("fedproto", KEYS, transport, NAMES, tmp_path / "run", limits=QUICK)
    files = {file.name for file in run_of(tmp_path / "north").iterdir()}
    assert {"model.safetensors", "prototypes.safetensors", "classifier.safetensors", "README.md"} <= files


def test_measures_leave_where_the_policy_lets_them(nodes, tmp_path):
    transport = LocalTransport(nodes((None, Policy(measures=False), None)))
    serve("fedproto", KEYS, transport, NAMES, tmp_path / "run", limits=QUICK)
    [run] = read_folder(tmp_path / "run").runs
    assert all(row["accuracy_head"][1] is None and row["samples"][1] == 0 for row in run.clients)
    assert list(run.confusions().clients) == ["north", "west"]


# --- who they are -----------------------------------------------------------------------------------------------------
def test_classes_are_agreed_on_by_name():
    card = Card("a", "mlp", (4,), 2, 10, 5, classes=("cat", "dog"))
    assert agreed_classes([card, replace(card, name="b", classes=("dog", "fox"))]) == (("cat", "dog", "fox"), 3)
    assert agreed_classes([card, card]) == (("cat", "dog"), 2)
    assert agreed_classes([replace(card, classes=(), num_classes=n) for n in (3, 5)]) == ((), 5)
    with pytest.raises(ProtofedError, match="b does not"):
        agreed_classes([card, replace(card, name="b", classes=())])
    with pytest.raises(ProtofedError, match=r"b: its samples have shape \(3,\)"):
        check_shapes([card, replace(card, name="b", shape=(3,))])


def test_labels_are_translated_to_the_federations_classes(nodes):
    names = ("cat", "dog", "fox", "owl")
    data = part(0, class_names=names)
    card = Node("north", nodes()["north"].folder, data, MODELS[0]).card()
    settings = resolve("fedproto", {**KEYS, "data": data})
    wanted = ("ant", "owl", "fox", "dog", "cat")
    own = site_data(data, settings, [card], 0, wanted, 5).clients[0]
    assert torch.equal(own.labelled.labels.unique(), torch.tensor([1, 2, 3]))  # dog, fox and owl
    with pytest.raises(ProtofedError, match="'owl' is none of the federation's classes"):
        site_data(data, settings, [card], 0, ("cat", "dog", "fox"), 3)


def test_a_site_that_does_not_come_is_named(nodes, tmp_path):
    sites = nodes()
    del sites["west"]
    with pytest.raises(ProtofedError, match="sites that have not joined within 1 s: west"):
        serve("fedproto", KEYS, LocalTransport(sites), NAMES, tmp_path / "run", limits=Limits(5, 3, 1))
    assert not (tmp_path / "run").exists()


def test_settings_that_are_the_sites_own_are_refused(nodes, tmp_path):
    for key in ("data", "model", "partition", "models"):
        with pytest.raises(ProtofedError, match=f"{key}: each site has its own"):
            serve("fedproto", {**KEYS, key: "x"}, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK)


def test_a_refusal_is_an_error_of_one_line():
    with pytest.raises(Refusal):
        Policy(methods=("fedavg",)).check_run(resolve("fedproto", {}).method, 3)


# --- monitoring -------------------------------------------------------------------------------------------------------
def test_numbers_of_a_run_can_be_read_while_it_goes_on(nodes, tmp_path):
    pytest.importorskip("prometheus_client")
    from urllib.error import HTTPError
    from urllib.request import urlopen

    from protofed.deploy.metrics import Metrics

    transport = LocalTransport(nodes())
    pages = []
    with Metrics(transport, 3) as metrics:

        def watch(record, rounds):
            metrics.round(record, rounds)
            pages.append(urlopen(f"http://127.0.0.1:{metrics.port}/metrics").read().decode())

        serve("fedproto", KEYS, transport, NAMES, tmp_path / "run", limits=QUICK, watch=watch)
        health = json.loads(urlopen(f"http://127.0.0.1:{metrics.port}/health").read())
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{metrics.port}/etc/passwd")
    assert health == {"status": "ok", "round": 4, "rounds": 4}
    values = [dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#") for page in pages]
    assert [float(v["protofed_round"]) for v in values] == [1, 2, 3, 4]
    assert float(values[0]["protofed_sites_connected"]) == float(values[0]["protofed_sites"]) == 3
    [run] = read_folder(tmp_path / "run").runs
    total = sum(sum(row["up"].values()) for row in run.rounds)
    assert float(values[-1]['protofed_bytes_total{direction="up"}']) == total


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        ("fedproto", {"shared_optimiser": True}, "sites train at the same time"),
        ("semifl", {"server_statistics": "all"}, "the server has no samples of the sites"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused(method, given, said, nodes, tmp_path):
    with pytest.raises(ProtofedError, match=said):
        serve(method, {**KEYS, **given}, LocalTransport(nodes()), NAMES, tmp_path / "run", limits=QUICK)
    assert not (tmp_path / "run").exists()
