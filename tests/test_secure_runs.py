"""Federations with secure sums: the same figures as plain ones, who drops out, what the server sees, and who is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

import protofed as pf
from protofed import methods, wire
from protofed.deploy.node import Node
from protofed.deploy.policy import Policy
from protofed.deploy.remote import Limits
from protofed.deploy.serve import serve
from protofed.deploy.transport import LocalTransport
from protofed.errors import ProtofedError, Stopped
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.rounds import Federation
from protofed.federation.secure import SimulatedParties, check_secure
from protofed.parts.reduce import Mean, Running, Sums
from protofed.privacy.fixed import STEP
from protofed.privacy.protocol import STEPS, Rules
from protofed.results.read import read_folder
from support.engines import ENGINES, LOOP, assert_close, finish
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for
from test_deploy import KEYS, MODELS, NAMES, part, run_of, simulated, without_clock

ADDITIVE = [name for name in methods.available() if methods.get(name).reduce.additive and methods.get(name).exchange.up]
QUICK = Limits(seconds=20, quorum=3, patience=20)


def settings_of(method, **given):
    """Dropout has other random draws in a stack, so there is none."""
    return resolve(method, {"projection_dropout": 0.0, **SMALL, **labels_for(method), "data": blobs(), **given})


def federation_of(method, **given):
    return build(settings_of(method, **given))[1]


class Totals:
    """Copies of what uploads add up to in each round, before a server's noise is added, and the uploads themselves."""

    def __init__(self):
        self.sums, self.uploads = [], []
        update, add = Federation._update, Running.add

        def watched(federation, running, *rest):
            tensors = {name: value.clone() for name, value in running.total.tensors.items()}
            self.sums.append(Sums(tensors, dict(running.total.numbers), dict(running.total.dtypes)))
            return update(federation, running, *rest)

        def heard(running, uploads):
            self.uploads += uploads
            return add(running, uploads)

        self.patch = mock.patch.object(Federation, "_update", watched), mock.patch.object(Running, "add", heard)

    def __enter__(self):
        for patch in self.patch:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patch:
            patch.stop()


def assert_sums(secure, plain, clients):
    """Sums that differ by no more than the rounding of each client's numbers, and of float32 where that is their dtype.

    What no client has is zero in a secure sum, and missing in a plain one.
    """
    for name, value in secure.tensors.items():
        wanted = plain.tensors.get(name, torch.zeros_like(value))
        assert value.dtype == wanted.dtype and value.shape == wanted.shape
        rounding = clients * torch.finfo(value.dtype).eps * wanted.double().abs()
        assert bool(((value.double() - wanted.double()).abs() <= clients * STEP / 2 + rounding).all()), name
    for name, number in secure.numbers.items():
        assert number == pytest.approx(plain.numbers.get(name, 0.0), abs=clients * STEP / 2), name
    assert plain.tensors.keys() <= secure.tensors.keys() and plain.numbers.keys() <= secure.numbers.keys()


@pytest.mark.parametrize("method", methods.available())
def test_every_method_has_the_plain_sums_or_is_refused(method):
    if method not in ADDITIVE:
        with pytest.raises(ProtofedError, match=r"each upload by itself|send nothing"):
            settings_of(method, secure="sums")
        return
    with Totals() as plain:
        one = federation_of(method, rounds=1)
        [record] = list(one)
    with Totals() as secure:
        other = federation_of(method, rounds=1, secure="sums")
        [secured] = list(other)
    assert not secure.uploads  # the server has had none
    assert_sums(secure.sums[0], plain.sums[0], 5)
    assert_close(other.state, one.state)
    assert secured.loss == record.loss and secured.dropped == {} and secured.notes == []


@pytest.mark.parametrize("engine", ["stack", "workers", "workers stack"])
@pytest.mark.parametrize("method", slow_but("fedproto", ["fedproto", "fedavg", "fedpagr"]))
def test_engines_have_the_same_figures(method, engine):
    server, states, records = finish(settings_of(method), LOOP)
    secure_server, secure_states, secure_records = finish(settings_of(method, secure="sums"), ENGINES[engine])
    assert_close(secure_server, server)
    assert_close(secure_states, states)
    assert [r.loss for r in secure_records] == pytest.approx([r.loss for r in records], rel=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedproc"])
def test_clients_of_several_architectures_share_one_layout(method):
    models = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=4&embedding=5"], "clients": 6, "rounds": 1}
    given = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")} | models
    settings = [resolve(method, {**given, "data": blobs(), **more}) for more in ({}, {"secure": "sums"})]
    with Totals() as totals:
        plain, secure = (build(entry)[1] for entry in settings)
        list(plain), list(secure)
    assert_sums(totals.sums[1], totals.sums[0], 6)
    assert_close(secure.state, plain.state)
    if method == "fedavg":
        assert {name.partition(":")[0] for name in totals.sums[1].tensors} == {"weight/0", "weight/1"}


@pytest.mark.parametrize("placement", ["central", "local"])
@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_with_differential_privacy(method, placement):
    privacy = f"client?noise=0.5&clip=2&placement={placement}"
    with Totals() as totals:
        plain = federation_of(method, rounds=1, privacy=privacy)
        secure = federation_of(method, rounds=1, privacy=privacy, secure="sums")
        (one,), (other,) = list(plain), list(secure)
    assert_sums(totals.sums[1], totals.sums[0], 5)
    assert other.measures["epsilon"] == one.measures["epsilon"] > 0
    for a, b in zip(
        torch.utils._pytree.tree_leaves(plain.state), torch.utils._pytree.tree_leaves(secure.state), strict=True
    ):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=2e-2)  # noise is on a grid, so a rounding error may be a step


def test_filters_that_keep_the_form_and_attackers_act_before_the_sum():
    given = {"filters": ["clip?norm=0.5"], "attack": "sign-flip?share=0.2&scale=3", "rounds": 1}
    with Totals() as totals:
        for more in ({}, {"secure": "sums"}):
            list(federation_of("fedproto", **given, **more))
    assert_sums(totals.sums[1], totals.sums[0], 5)


def test_stopped_and_resumed_it_gives_the_same_bits(tmp_path):
    def stop(record, rounds):
        if record.round == 2:
            raise KeyboardInterrupt

    settings = settings_of("fedproto", rounds=4, checkpoint_every=1, secure="sums?least=4")
    pf.run(settings, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        pf.run(settings, out=tmp_path / "stopped", watch=stop)
    result = pf.resume(tmp_path / "stopped", data=blobs())
    assert result.settings.general.secure == "sums?least=4"
    one, other = (read_folder(tmp_path / name).runs[0] for name in ("whole", "stopped"))
    assert without_clock(one.rounds) == without_clock(other.rounds)
    assert without_clock(one.metrics) == without_clock(other.metrics)
    states = [sorted((tmp_path / name / "checkpoint").glob("round-*4/*.safetensors")) for name in ("whole", "stopped")]
    assert states[0] and [f.read_bytes() for f in states[0]] == [f.read_bytes() for f in states[1]]


# --- clients that leave ---------------------------------------------------------------------------------------------------
def plain_uploads(**given):
    """What each client would have sent in the first round, and the rule by which it is summed."""
    with Totals() as plain:
        federation = federation_of("fedproto", rounds=1, **given)
        list(federation)
    return {upload.client: upload for upload in plain.uploads}, federation.rule


@pytest.mark.parametrize("step", [*STEPS, "every"])
def test_a_third_leaves_and_the_total_is_that_of_the_others(step):
    uploads, rule = plain_uploads(clients=12, shot=5)
    federation = federation_of("fedproto", rounds=1, clients=12, shot=5, secure="sums?share=0.1")
    absent = (
        {step: {1, 4, 7, 10}}
        if step != "every"
        else dict(zip(STEPS, ({0, 3, 6, 9}, {1, 4, 7}, {2, 5}, {8}), strict=True))
    )
    federation.engine.absent = absent
    with Totals() as secure:
        [record] = list(federation)
    gone = set().union(*absent.values())
    silent = set().union(*(clients for name, clients in absent.items() if name != "unmask"))
    assert set(record.dropped) == gone and all("no answer" in reason for reason in record.dropped.values())
    assert all(("in the sum" in record.dropped[c]) == (c not in silent) for c in gone)
    wanted = Sums()
    rule.lift([upload for client, upload in uploads.items() if client not in silent], wanted)
    assert_sums(secure.sums[0], wanted, 12)
    assert secure.sums[0].numbers["clients"] == 12 - len(silent)


def test_a_round_with_too_few_has_no_result(tmp_path):
    federation = federation_of("fedproto", rounds=2, secure="sums?least=4")
    before = federation.state
    federation.engine.absent = {"masked": [0, 1]}
    record = federation.step()
    assert federation.state is before and set(record.dropped) == set(range(5))
    [note] = record.notes
    assert "3 clients are left after 'masked'; at least 4 are needed" in note and "keeps its state" in note
    assert record.up["secure"] > 0 and record.down["secure"] > 0
    federation.engine.absent = {}
    record = federation.step()
    assert federation.state is not before and record.dropped == {} and record.notes == []


def test_a_client_whose_numbers_no_sum_can_hold_drops_out_with_the_name_of_the_tensor():
    federation = federation_of("fedproto", rounds=1, secure="sums", attack="scaling?share=0.2&factor=1e30")
    [record] = list(federation)
    [(client, reason)] = record.dropped.items()
    assert client in federation.attackers and "'means/'" in reason and "1e" not in reason
    assert all(torch.isfinite(t).all() for t in torch.utils._pytree.tree_leaves(federation.state))


# --- what the server sees -------------------------------------------------------------------------------------------------
def test_nothing_that_a_client_sends_correlates_with_its_upload():
    """All answers of client 2 in two runs that are the same but for their keys."""
    given = {"clients": 8, "embedding": 300, "secure": "sums", "rounds": 1}
    transcripts, vectors = [], []
    for _ in range(2):
        federation = federation_of("fedproto", **given)
        answers = {}
        ask = federation.engine.ask

        def recorded(round, step, messages, ask=ask, answers=answers):
            for client, answer in ask(round, step, messages):
                answers[step, client] = answer
                yield client, answer

        federation.engine.ask = recorded
        list(federation)
        transcripts.append(answers)
        vectors.append(federation.engine._vectors[2])
    assert np.array_equal(*vectors)
    assert {key: len(answer) for key, answer in transcripts[0].items()} == {
        k: len(a) for k, a in transcripts[1].items()
    }
    words = [np.frombuffer(t["masked", 2][32:], dtype="<u8") for t in transcripts]
    assert len(words[0]) == len(vectors[0]) > 1200
    bound = 5 / np.sqrt(len(words[0]))
    own = vectors[0].view(np.int64).astype(float)
    for sent in (words[0], words[1], words[0] - words[1]):
        assert abs(np.corrcoef(own, sent.astype(float))[0, 1]) < bound
        assert abs(np.corrcoef(own != 0, sent.view(np.int64) > 0)[0, 1]) < bound
        bits = np.unpackbits(sent.view(np.uint8))
        assert abs(bits.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(bits))
    for (step, client), answer in transcripts[0].items():
        if client == 2:
            rest = answer[32:]
            assert vectors[0].tobytes()[:64] not in answer
            assert rest != transcripts[1][step, client][32:]  # fresh keys each time, so nothing is sent twice


def test_bytes_are_counted_as_a_kind_of_their_own(tmp_path):
    result = pf.run(settings_of("fedproto", rounds=2, secure="sums"), out=tmp_path / "run")
    length = 4 * 5 + 4 + 4 + 1  # class sums, counts, holders, clients
    [run] = read_folder(tmp_path / "run").runs
    for row in run.rounds:
        assert row["up"]["secure"] == 5 * (8 * length + 64 * 4 + 240) and row["down"]["secure"] == 5 * (124 * 4 + 200)
        assert row["up"]["prototypes"] == row["up"]["scalars"] == 0
    assert result.summary["bytes_up"]["secure"] == 2 * run.rounds[0]["up"]["secure"]
    plain = pf.run(settings_of("fedproto", rounds=1))
    assert "secure" not in plain.summary["bytes_up"]


# --- who is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "given", "reason"),
    [
        ("fedapa", {}, "fedapa needs each upload by itself"),
        ("fedproto", {"reduce": "median"}, "reduce=median of fedproto needs each upload by itself"),
        ("fedproto", {"filters": ["quantise"]}, "filters=quantise changes the form of an upload"),
        ("fedproto", {"participation": 0.4}, "2 clients take part in a round, and a sum needs at least 3"),
        ("fedproto", {"choice": "diverse"}, "choice=diverse chooses clients by their uploads"),
        ("local", {}, "clients of local send nothing"),
        ("fedproto", {"secure": "sums?least=1"}, "least=1"),
        ("fedproto", {"secure": "sums?most=9"}, "most"),
        ("fedproto", {"secure": "totals"}, "totals"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(method, given, reason):
    with pytest.raises(ProtofedError) as error:
        settings_of(method, **{"secure": "sums", **given})
    assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (wire.exchange.array("response", "classes"), "sends response, which its rule does not sum"),
        (wire.exchange.bank("helpers", (None, "classes", "dim")), "sends helpers, whose size nobody knows beforehand"),
    ],
)
def test_parts_that_cannot_be_summed_are_refused(sent, reason):
    exchange = wire.Exchange((wire.exchange.bank(),), (wire.exchange.bank(), sent))
    with pytest.raises(ProtofedError, match=reason):
        check_secure(exchange, "mine", Mean(), ())


def test_too_few_clients_in_the_data_are_refused():
    """How many clients there are is known when the data has been read."""
    data = blobs()
    rooms = [torch.arange(len(labels)) % 2 for labels in (data.y_train, data.y_test)]
    data = replace(data, group_train=rooms[0], group_test=rooms[1])
    given = {k: v for k, v in SMALL.items() if k not in ("clients", "way", "shot", "partition")}
    settings = resolve("fedproto", {**given, "data": data, "partition": "natural", "secure": "sums"})
    with pytest.raises(ProtofedError, match="2 clients take part in a round"):
        build(settings)


# --- between sites --------------------------------------------------------------------------------------------------------
@pytest.fixture
def nodes(tmp_path):
    def make(policies=(None, None, None)):
        return {name: Node(name, tmp_path / name, part(k), MODELS[k], policies[k]) for k, name in enumerate(NAMES)}

    return make


class Listening(LocalTransport):
    """A transport that keeps all replies, and at which sites can be lost at a step of a secure sum."""

    def __init__(self, services):
        super().__init__(services)
        self.replies, self.gone = [], {}

    def call(self, function, messages, timeout):
        step = next((s for s in STEPS for m in messages.values() if f'"step": "{s}"'.encode() in m[:400]), "")
        self.lost = dict.fromkeys(self.gone.get(step, ()), "the line is dead")
        replies = super().call(function, messages, timeout)
        self.lost = {}
        self.replies.append((function, step, replies))
        return replies


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_sites_give_the_bits_of_a_simulation_and_no_upload(method, nodes, tmp_path):
    transport = Listening(nodes())
    serve(method, {**KEYS, "secure": "sums"}, transport, NAMES, tmp_path / "run", limits=QUICK)
    loop = simulated(method, {"folder": tmp_path / "simulated", "secure": "sums"})
    assert isinstance(loop.engine, SimulatedParties)
    records = list(loop)
    [run] = read_folder(tmp_path / "run").runs
    for record, row, clients in zip(records, run.rounds, run.clients, strict=True):
        assert row["terms"] == json.loads(json.dumps(record.terms)) and row["dropped"] == {}
        assert row["up"] == {k: record.up[k] for k in row["up"]} and row["up"]["secure"] > 0
        assert row["down"] == {k: record.down[k] for k in row["down"]}
        assert clients["accuracy_head"] == [s.accuracy_head for s in record.scores]
    trained = [reply for function, _, replies in transport.replies if function == "train" for reply in replies.values()]
    for reply in filter(lambda r: isinstance(r, bytes), trained):
        assert len(reply) == 4 + int.from_bytes(reply[:4], "little")  # a header, and nothing behind it


def test_a_site_that_is_lost_in_between_drops_out_with_the_reason(nodes, tmp_path):
    transport = Listening(nodes())
    transport.gone = {"masked": ["south"]}
    given = {**KEYS, "rounds": 2, "secure": "sums?least=2"}
    serve("fedproto", given, transport, NAMES, tmp_path / "run", limits=replace(QUICK, quorum=2))
    [run] = read_folder(tmp_path / "run").runs
    assert [row["dropped"] for row in run.rounds] == [{"1": "south: masked: the line is dead"}] * 2
    assert not any("notes" in row for row in run.rounds)


def test_a_site_that_was_started_anew_drops_out(nodes, tmp_path):
    services, made = nodes(), []

    class Forgetful:
        """A site whose process ends between training and the secure sum."""

        def handle(self, function, message):
            if function == "secure":
                made.append(Node("west", tmp_path / "west", part(2), MODELS[2]))
                return made[-1].handle(function, message)
            return services["west"].handle(function, message)

    transport = LocalTransport({**services, "west": Forgetful()})
    given = {**KEYS, "rounds": 1, "secure": "sums?least=2"}
    serve("fedproto", given, transport, NAMES, tmp_path / "run", limits=QUICK)
    [run] = read_folder(tmp_path / "run").runs
    assert "was started anew" in run.rounds[0]["dropped"]["2"] and len(run.rounds[0]["dropped"]) == 1


def test_a_site_whose_policy_asks_for_sums_takes_part_in_nothing_else(nodes, tmp_path):
    services = nodes((Policy(secure=True), Policy(secure=True, least=4), None))
    for given, reasons in (
        ({}, ("secure sums alone", "secure sums alone")),
        ({"secure": "sums"}, ("", "at least 4 sites")),
        ({"secure": "sums?least=2"}, ("at least 3 sites", "at least 4 sites")),
    ):
        transport = Listening(services)
        limits = replace(QUICK, quorum=1, patience=1)
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        serve("fedproto", {**KEYS, "rounds": 1, **given}, transport, NAMES, out, limits=limits)
        [run] = read_folder(out).runs
        dropped = run.rounds[0]["dropped"]
        assert all(reason in dropped.get(str(site), "") for site, reason in enumerate(reasons)), dropped
        if not given:
            assert set(dropped) == {"0", "1"}


def test_nothing_of_a_site_but_its_part_of_the_sum_leaves_where_its_policy_says_so(nodes, tmp_path):
    transport = Listening(nodes([Policy(secure=True, measures=False)] * 3))
    serve("fedproto", {**KEYS, "rounds": 1, "secure": "sums"}, transport, NAMES, tmp_path / "run", limits=QUICK)
    replies = [r for function, _, r in transport.replies if function == "train"][-1]  # at first the run was unknown
    for reply in replies.values():
        header = json.loads(reply[4:])
        assert header["terms"] == header["pseudo"] == header["measures"] == {} and header["returned"]
    [run] = read_folder(tmp_path / "run").runs
    assert run.rounds[0]["dropped"] == {} and run.rounds[0]["loss"] is None


def test_classes_of_too_few_samples_stay_out_of_the_sum(nodes, tmp_path):
    """Every site has 30 samples of three classes: of which one bound leaves all, and the other none."""
    counts = {}
    for least in (30, 31):
        services = nodes([Policy(secure=True, min_samples=least)] * 3)
        with Totals() as totals:
            out = tmp_path / f"run{least}"
            serve(
                "fedproto", {**KEYS, "rounds": 1, "secure": "sums"}, LocalTransport(services), NAMES, out, limits=QUICK
            )
        counts[least] = totals.sums[0].tensors["counts/"].tolist()
    assert sum(counts[30]) == 3 * 90 and sum(counts[31]) == 0


def test_a_vector_is_given_once_for_a_round_and_not_for_another(nodes, tmp_path):
    services = nodes()
    serve(
        "fedproto",
        {**KEYS, "rounds": 1, "secure": "sums"},
        LocalTransport(services),
        NAMES,
        tmp_path / "run",
        limits=QUICK,
    )
    name = run_of(tmp_path / "north").name
    round, party = services["north"].parties[name]
    assert round == 1 and party._secrets is None  # all of it is forgotten after the last step
    from protofed.federation.site import sealed

    for header in ({"run": name, "round": 2, "step": "keys"}, {"run": "other", "round": 1, "step": "keys"}, {}):
        with pytest.raises(ProtofedError, match="holds nothing of that round"):
            services["north"].handle("secure", sealed(header, b""))
    with pytest.raises(ProtofedError, match="no step"):
        services["north"].handle("secure", sealed({"run": name, "round": 1, "step": "all"}, b""))


def test_rules_are_read_from_the_setting():
    inputs = federation_of("fedproto", secure="sums?degree=40&share=0.1&least=5", clients=6).secure
    assert inputs.rules == Rules(5, 40, 0.1)
