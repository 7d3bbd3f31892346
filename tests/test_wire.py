"""What travels comes back bit for bit, its bytes are counted, and nothing a sender does harms the receiver."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed import wire
from protofed.bank import PrototypeBank
from protofed.wire import Bundle, Exchange, Expected, Part, WireError, decode, encode, sizes

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.bool)
QUICK = settings(max_examples=60, deadline=None)


def refused(call: Callable[[], object], *says: str) -> str:
    with pytest.raises(WireError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) <= 400
    for part in says:
        assert part in text
    return text


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    value = torch.randn(shape, generator=generator) * 100
    value = value.to(draw(st.sampled_from(dtypes)))
    return value.transpose(0, -1) if value.ndim > 1 and draw(st.booleans()) else value  # not contiguous


@st.composite
def banks(draw: st.DrawFn) -> PrototypeBank:
    """Single or stacked, with classes missing, none known, or none there at all."""
    lead = draw(st.lists(st.integers(0, 3), max_size=2))
    classes, dim = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    counts = torch.randint(0, 3, (*lead, classes), generator=generator).to(dtype) * 1.5
    means = torch.randn(*lead, classes, dim, generator=generator, dtype=dtype) * (counts > 0)[..., None]
    return PrototypeBank(means, counts)


BUNDLES = st.builds(
    Bundle,
    bank=st.none() | banks(),
    banks=st.dictionaries(NAMES, banks(), max_size=3),
    weights=st.dictionaries(NAMES, tensors(), max_size=3),
    tensors=st.dictionaries(NAMES, tensors(), max_size=3),
    scalars=st.dictionaries(NAMES, st.floats(allow_nan=False) | st.integers(-(2**53), 2**53), max_size=3),
    models=st.dictionaries(
        NAMES.filter(lambda name: "/" not in name),
        st.dictionaries(NAMES, tensors(), min_size=1, max_size=3),
        max_size=2,
    ),
)


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a, b)


def same_bundle(a: Bundle, b: Bundle) -> None:
    assert a.all_banks().keys() == b.all_banks().keys() and (a.bank is None) == (b.bank is None)
    for name, bank in a.all_banks().items():
        same(bank.means, b.all_banks()[name].means)
        same(bank.counts, b.all_banks()[name].counts)
    assert a.models.keys() == b.models.keys()
    models = [(own, b.models[name]) for name, own in a.models.items()]
    for mine, other in ((a.weights, b.weights), (a.tensors, b.tensors), *models):
        assert mine.keys() == other.keys()
        for name in mine:
            same(mine[name], other[name])
    assert a.scalars == b.scalars


# --- round trips and bytes ------------------------------------------------------------------------------------------


@QUICK
@given(BUNDLES)
def test_a_bundle_comes_back_bit_for_bit(bundle: Bundle) -> None:
    same_bundle(bundle, decode(encode(bundle)))


@QUICK
@given(BUNDLES)
def test_a_bytearray_is_decoded_as_bytes_are(bundle: Bundle) -> None:
    """It may lie in the message itself, but only where torch would put it: a product's last bits depend on it."""
    same_bundle(bundle, decode(bytearray(encode(bundle))))
    weight = Bundle(weights={"w": torch.ones(3)})
    for form in (bytes, bytearray):
        decoded = decode(form(encode(weight))).weights["w"]
        assert decoded.data_ptr() % 64 == 0
        decoded.zero_()
    assert decode(encode(weight)).weights["w"].eq(1).all()


def test_weights_that_are_summed_lie_in_their_message() -> None:
    """A sum needs no alignment, so an upload of megabytes is not copied for it."""
    message = bytearray(encode(Bundle(weights={"a": torch.ones(3), "b": torch.full((2, 2), 2.0)})))
    (decoded,) = wire.decode_each([message], ["client 1"], summed=["weights"])
    assert isinstance(decoded, Bundle)
    assert decoded.weights["a"].tolist() == [1, 1, 1] and decoded.weights["b"].tolist() == [[2, 2], [2, 2]]
    before = bytes(message)
    decoded.weights["a"].zero_()
    assert message != before


@QUICK
@given(BUNDLES)
def test_sizes_are_the_whole_message(bundle: Bundle) -> None:
    message = encode(bundle)
    count = sizes(message)
    assert sum(count.values()) == len(message) and set(count) <= set(wire.BYTE_KINDS)
    rows = [(int(b.known.sum()), b) for b in bundle.all_banks().values()]
    assert count["prototypes"] == sum(n * b.dim * b.means.element_size() for n, b in rows)
    values = [w for own in (bundle.weights, *bundle.models.values()) for w in own.values()]
    assert count["weights"] == sum(w.numel() * w.element_size() for w in values)
    small = sum(n * (4 + b.counts.element_size()) for n, b in rows)
    small += sum(t.numel() * t.element_size() for t in bundle.tensors.values())
    assert count["scalars"] == small + 8 * len(bundle.scalars)


@pytest.mark.parametrize(
    ("clients", "classes", "of", "dim", "parameters"),
    [(20, 3, 62, 50, 3_000), (20, 3, 10, 512, 30_720), (20, 10, 10, 512, 102_400)],
)
def test_fedsap_table_2(clients: int, classes: int, of: int, dim: int, parameters: int) -> None:
    """Parameters on the wire in a round: prototypes of the classes each client has, and no others."""
    sent = 0
    for client in range(clients):
        y = (client + torch.arange(classes)) % of
        bank = PrototypeBank.from_embeddings(torch.randn(classes, dim), y, of)
        sent += sizes(encode(Bundle(bank=bank)))["prototypes"]
    assert sent == parameters * 4


def test_unknown_rows_do_not_travel() -> None:
    bank = PrototypeBank(torch.full((3, 2), 7.0), torch.tensor([0.0, 2.0, 0.0]))
    back = decode(encode(Bundle(bank=bank))).bank
    assert back is not None
    same(back.counts, bank.counts)
    same(back.means, torch.tensor([[0.0, 0.0], [7.0, 7.0], [0.0, 0.0]]))


def test_a_tensor_named_means_is_no_prototype() -> None:
    count = sizes(encode(Bundle(tensors={"a:means": torch.zeros(3)}, weights={"bank:x:means": torch.zeros(5)})))
    assert (count["prototypes"], count["weights"], count["scalars"]) == (0, 20, 12)


def test_tensors_that_share_memory_travel_twice() -> None:
    shared = torch.arange(6.0)
    bundle = Bundle(weights={"a": shared, "tied": shared, "half": shared[3:]}, tensors={"a": shared.view(2, 3)})
    same_bundle(bundle, decode(encode(bundle)))


def test_what_needs_a_gradient_travels_without_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not decode(encode(Bundle(weights={"w": weight}))).weights["w"].requires_grad


def test_values_that_are_not_numbers_travel() -> None:
    """Refusing them is the receiver's business."""
    back = decode(encode(Bundle(scalars={"a": float("nan"), "b": -float("inf"), "c": 1e308})))
    assert back.scalars["a"] != back.scalars["a"] and back.scalars["b"] == -float("inf") and back.scalars["c"] == 1e308


def test_the_same_bundle_gives_the_same_bytes() -> None:
    empty = PrototypeBank.empty(3, 2)
    bundle = Bundle(empty, {"b": empty, "a": empty}, {"w": torch.ones(3), "v": torch.ones(3)}, scalars={"s": 1.0})
    assert len({encode(bundle) for _ in range(30)}) == 1


# --- hostile messages -----------------------------------------------------------------------------------------------

EXAMPLE = encode(
    Bundle(
        PrototypeBank(torch.ones(4, 3), torch.tensor([1.0, 0.0, 2.0, 5.0])),
        {"peers": PrototypeBank(torch.ones(2, 4, 3), torch.ones(2, 4))},
        {"w": torch.ones(2, 2)},
        {"t": torch.arange(3)},
        {"s": 0.5},
        {"helper0": {"w": torch.ones(2, 2)}},
    )
)


def only_wire_errors(message: bytes) -> None:
    try:
        decode(message, "client 7")
    except WireError as error:
        assert str(error).startswith("client 7: ") and "\n" not in str(error)
    try:
        sizes(message, "client 7")
    except WireError as error:
        assert str(error).startswith("client 7: ")


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes(message: bytes) -> None:
    refused(lambda: decode(message, "client 7"), "client 7: not a protofed message")
    only_wire_errors(message)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, len(EXAMPLE) - 1))
def test_messages_cut_short(length: int) -> None:
    refused(lambda: decode(EXAMPLE[:length], "client 7"), "client 7: ")


def test_bytes_after_the_message() -> None:
    refused(lambda: decode(EXAMPLE + b"\0", "client 7"), "client 7: ")


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(EXAMPLE) - 1), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    message = bytearray(EXAMPLE)
    for place, bits in flips:
        message[place] ^= bits
    only_wire_errors(bytes(message))


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(), lambda j: st.lists(j) | st.dictionaries(st.text(), j)
    )
)
def test_any_json_as_header_or_description(value: object) -> None:
    for header in (
        value,
        {"__metadata__": value},
        {"__metadata__": {"protofed": json.dumps(value)}},
        {"weight:w": value},
    ):
        only_wire_errors(framed(header))
    about = {"version": 1, "banks": value}
    only_wire_errors(framed({"__metadata__": {"protofed": json.dumps(about)}}))


def expecting(*parts: Part, template: Mapping[str, Tensor] | None = None, **sizes: int) -> Expected:
    """What a client expects of a server that sends these parts."""
    return Exchange(down=parts).expected("down", sizes, template or {})


def framed(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def crafted(
    shapes: object, entries: Mapping[str, tuple[Tensor, list[int]]] | None = None, version: object = 1
) -> bytes:
    """A well-formed safetensors file with any description; each entry has a tensor and the shape to claim."""
    kinds = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL"}
    header: dict[str, object] = {"__metadata__": {"protofed": json.dumps({"version": version, "banks": shapes})}}
    body = b""
    for key, (value, shape) in (entries or {}).items():
        data = value.numpy().tobytes()
        header[key] = {"dtype": kinds[value.dtype], "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    return framed(header, body)


def bank_entries(
    means: Tensor, rows: list[int], counts: list[float], kind: torch.dtype = torch.int32
) -> dict[str, tuple[Tensor, list[int]]]:
    values = {"means": means, "rows": torch.tensor(rows, dtype=kind), "counts": torch.tensor(counts)}
    return {f"bank::{k}": (v, list(v.shape)) for k, v in values.items()}


def test_crafted_messages_are_as_ours() -> None:
    back = decode(crafted({"": [3, 2]}, bank_entries(torch.ones(2, 2), [0, 2], [1.0, 4.0]))).bank
    assert back is not None
    same(back.counts, torch.tensor([1.0, 0.0, 4.0]))


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_lengths(length: int) -> None:
    refused(lambda: decode(struct.pack("<Q", length) + b"{}", "client 7"), "client 7: ")
    refused(lambda: decode(struct.pack("<Q", length) + EXAMPLE[8:], "client 7"), "client 7: ")


def test_header_bombs() -> None:
    deep = b"[" * 200_000
    nested = json.dumps({"protofed": "[" * 200_000}).encode()
    long_number = json.dumps({"protofed": "9" * 100_000}).encode()
    for header in (
        deep,
        b'{"__metadata__":' + deep,
        b'{"__metadata__":' + nested + b"}",
        b'{"a":' + b"9" * 10**5 + b"}",
    ):
        refused(lambda header=header: decode(framed(header), "client 7"), "client 7: ")
    refused(lambda: decode(framed(b'{"__metadata__":' + long_number + b"}"), "client 7"), "client 7: ")
    refused(lambda: decode(framed(b" " * (2**24 + 1)), "client 7"), "at most")
    many = {"": [9] * 500_000}  # the product of its sizes would take minutes
    refused(lambda: decode(crafted(many), "client 7"), "no proper shape")


@pytest.mark.parametrize(
    "shape",
    [[2**30, 2**30], [2**31, 1], [10**300, 3], [2**20] * 8, [10**5, 10**5], [2**27, 2], [2, 2**30, 3], [2**30, 0]],
)
def test_a_giant_shape_is_refused_before_memory_is_taken(shape: list[int]) -> None:
    dim = shape[-1] if shape[-1] < 2**40 else 0
    empty = bank_entries(torch.zeros(0, 1), [], [])
    empty["bank::means"] = (torch.zeros(0), [0, dim])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(lambda: decode(crafted({"": shape}, empty), "client 7"), "client 7: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


def test_many_banks_share_one_limit() -> None:
    shapes, entries = {}, {}
    for i in range(40):
        shapes[str(i)] = [2**12, 2**10]  # 2²² each
        for key, (value, shape) in bank_entries(torch.zeros(0, 2**10), [], []).items():
            entries[key.replace("::", f":{i}:")] = (value, shape)
    refused(lambda: decode(crafted(shapes, entries), "client 7"), "too large")


def test_with_expectations_a_shape_is_checked_before_memory_is_taken() -> None:
    message = crafted({"": [2**12, 2**12]}, bank_entries(torch.zeros(0, 2**12), [], []))
    expected = expecting(wire.bank(), classes=10, dim=50)
    refused(lambda: decode(message, "client 7", expected), "client 7: bank has shape [4096, 4096]; expected [10, 50]")


ONE = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (crafted({"": [3, 2]}, bank_entries(ONE, [3], [1.0])), "class numbers"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [-1], [1.0])), "class numbers"),
        (crafted({"": [3, 2]}, bank_entries(torch.ones(2, 2), [1, 1], [1.0, 1.0])), "class numbers"),
        (crafted({"": [3, 2]}, bank_entries(torch.ones(2, 2), [2, 0], [1.0, 1.0])), "class numbers"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [0], [0.0])), "no samples"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [0, 1], [1.0, 1.0])), "[1, 2] rows"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [0], [1.0, 1.0])), "[2] counts"),
        (crafted({"": [3, 4]}, bank_entries(ONE, [0], [1.0])), "[1, 2] rows"),
        (crafted({"": [3, 2]}, bank_entries(ONE.long(), [0], [1.0])), "int64"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [0], [1.0], torch.int64)), "int64"),
        (crafted({"": [3, 2]}, bank_entries(ONE, [0], [1.0], torch.float32)), "float32"),
        (crafted({"": [2]}, bank_entries(ONE, [0], [1.0])), "proper shape"),
        (crafted({"": [3, -2]}, bank_entries(ONE, [0], [1.0])), "proper shape"),
        (crafted({"": [3, 2.0]}, bank_entries(ONE, [0], [1.0])), "proper shape"),
        (crafted({"": [3, True]}, bank_entries(ONE, [0], [1.0])), "proper shape"),
        (crafted({"": "32"}, bank_entries(ONE, [0], [1.0])), "proper shape"),
        (crafted({"": [3, 2]}), "bank::means"),
        (crafted({}, bank_entries(ONE, [0], [1.0])), "not part of a message"),
        (crafted({}, {"other:x": (ONE, [1, 2])}), "not part of a message"),
        (crafted({}, {"scalar:x": (ONE, [1, 2])}), "not part of a message"),
        (crafted({}, {"scalar:x": (torch.ones(1), [])}), "not part of a message"),
        (crafted({}, {"model:x": (ONE, [1, 2])}), ""),
        (crafted({}, {"model:x/w": (ONE, [1, 2])}), ""),
        (crafted({}, version=2), "version 2"),
        (crafted([]), ""),
        (framed({}), "__metadata__"),
        (framed({"__metadata__": {"other": "1"}}), "protofed"),
        (framed([]), "not a mapping"),
        (framed({"__metadata__": {"protofed": "{}"}}), "version"),
    ],
)
def test_crafted_descriptions(message: bytes, says: str) -> None:
    refused(lambda: decode(message, "client 7"), "client 7: not a protofed message", says)


def test_names_from_outside_cannot_fill_or_forge_a_log() -> None:
    forged = "x\nclient 1: fine\x1b[2J" + "y" * 10_000
    bundle = Bundle(tensors={forged: torch.zeros(1)}, banks={forged: PrototypeBank.empty(2, 2)})
    expected = expecting()
    refused(lambda: decode(encode(bundle), "client 7", expected), "client 7: ")
    refused(lambda: expected.check(Bundle(scalars={forged: 1.0}), "client 7"), "client 7: ")
    refused(lambda: decode(crafted({forged: [1]}), "client 7"), "client 7: ")
    refused(lambda: decode(crafted({}, {forged: (ONE, [1, 2])}), "client 7"), "client 7: ")


# --- what is expected -----------------------------------------------------------------------------------------------

C, D = 3, 2


def bank(means: object = 1.0, counts: object = 1.0, dtype: torch.dtype = torch.float32) -> PrototypeBank:
    return PrototypeBank(torch.full((C, D), 1.0, dtype=dtype) * means, torch.ones(C, dtype=dtype) * counts)  # type: ignore[operator]


TEMPLATE = {"w": torch.empty(2, 2, device="meta"), "n": torch.empty((), dtype=torch.int64)}
EXPECTED = expecting(
    wire.bank(optional=True),
    wire.bank("peers", (None, "classes", "dim"), optional=True),
    wire.bank("second", ("classes", 5), optional=True),
    wire.weights(optional=True),
    wire.models(optional=True),
    wire.array("soft", "classes", "classes", optional=True),
    wire.array("free", None, optional=True),
    wire.number("loss", optional=True),
    template=TEMPLATE,
    classes=C,
    dim=D,
)
WEIGHTS = {"w": torch.ones(2, 2), "n": torch.tensor(3)}


def test_what_was_asked_for_passes() -> None:
    full = Bundle(
        bank(),
        {"peers": PrototypeBank.stack([bank(), bank()]), "second": PrototypeBank.empty(C, 5)},
        WEIGHTS,
        {"soft": torch.zeros(C, C), "free": torch.arange(4.0)},
        {"loss": -1e300},
        {"helper0": WEIGHTS, "helper1": WEIGHTS},
    )
    alone = [Bundle(bank()), Bundle(PrototypeBank.empty(C, D)), Bundle(weights=WEIGHTS), Bundle(models={"a": WEIGHTS})]
    for bundle in (full, Bundle(), *alone):
        EXPECTED.check(bundle, "client 7")
        same_bundle(decode(encode(bundle), "client 7", EXPECTED), bundle)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bundle", "says"),
    [
        (Bundle(PrototypeBank.empty(C + 1, D)), "bank has shape [4, 2]; expected [3, 2]"),
        (Bundle(PrototypeBank.empty(C, D + 1)), "bank has shape [3, 3]; expected [3, 2]"),
        (Bundle(PrototypeBank.stack([bank()])), "bank has shape [1, 3, 2]; expected [3, 2]"),
        (Bundle(PrototypeBank(torch.ones(C, D), torch.ones(C, 1))), "counts of shape [3, 1]"),
        (Bundle(bank(NAN)), "bank holds NaN"),
        (Bundle(bank(INF)), "bank holds NaN or infinity"),
        (Bundle(bank(1.0, NAN)), "bank counts holds NaN"),
        (Bundle(bank(1.0, INF)), "bank counts holds NaN"),
        (Bundle(bank(1.0, torch.tensor([1.0, -1.0, 0.0]))), "negative count"),
        (Bundle(bank(dtype=torch.float64)), "bank is torch.float64"),
        (Bundle(PrototypeBank(torch.ones(C, D).long(), torch.ones(C))), "bank is torch.int64"),
        (Bundle(PrototypeBank(torch.ones(C, D), torch.ones(C, dtype=torch.int64))), "counts torch.int64"),
        (Bundle(banks={"peers": bank()}), "bank 'peers' has shape [3, 2]; expected [any, 3, 2]"),
        (Bundle(banks={"second": bank()}), "bank 'second' has shape [3, 2]; expected [3, 5]"),
        (Bundle(banks={"third": bank()}), "'third', which this method does not exchange"),
        (Bundle(weights={"w": torch.ones(2, 2)}), "weight 'n' is missing"),
        (Bundle(weights={**WEIGHTS, "v": torch.ones(1)}), "weight 'v' was not asked for"),
        (Bundle(weights={**WEIGHTS, "w": torch.ones(4)}), "weight 'w' has shape [4]; expected [2, 2]"),
        (
            Bundle(weights={**WEIGHTS, "w": torch.ones(2, 2).double()}),
            "weight 'w' is torch.float64; expected torch.float32",
        ),
        (Bundle(weights={**WEIGHTS, "n": torch.tensor(3.0)}), "weight 'n' is torch.float32; expected torch.int64"),
        (Bundle(weights={**WEIGHTS, "w": torch.tensor([[0.0, NAN], [0, 0]])}), "weight 'w' holds NaN"),
        (Bundle(weights={**WEIGHTS, "w": torch.tensor([[0.0, -INF], [0, 0]])}), "weight 'w' holds NaN or infinity"),
        (Bundle(tensors={"soft": torch.zeros(C)}), "tensor 'soft' has shape [3]; expected [3, 3]"),
        (Bundle(tensors={"soft": torch.zeros(C, C).half()}), "tensor 'soft' is torch.float16; expected torch.float32"),
        (Bundle(tensors={"free": torch.tensor([NAN])}), "tensor 'free' holds NaN"),
        (Bundle(tensors={"free": torch.zeros(2, 2)}), "tensor 'free' has shape [2, 2]; expected [any]"),
        (Bundle(tensors={"free": torch.tensor([True])}), "tensor 'free' is torch.bool; expected torch.float32"),
        (
            Bundle(tensors={"free": torch.zeros(2).to(torch.float8_e5m2)}),
            "tensor 'free' is torch.float8_e5m2; expected torch.float32",
        ),
        (Bundle(tensors={"other": torch.zeros(1)}), "'other', which this method does not exchange"),
        (Bundle(scalars={"loss": NAN}), "scalar 'loss' is nan"),
        (Bundle(scalars={"loss": -INF}), "scalar 'loss' is -inf"),
        (Bundle(scalars={"other": 1.0}), "'other', which this method does not exchange"),
        (Bundle(models={"a": {"w": torch.ones(2, 2)}}), "model 'a': weight 'n' is missing"),
        (Bundle(models={"a": WEIGHTS, "b": {}}), "model 'b': weight 'n' is missing"),
        (Bundle(models={"a": {**WEIGHTS, "v": torch.ones(1)}}), "model 'a': weight 'v' was not asked for"),
        (
            Bundle(models={"a": {**WEIGHTS, "w": torch.ones(4)}}),
            "model 'a': weight 'w' has shape [4]; expected [2, 2]",
        ),
        (
            Bundle(models={"a": {**WEIGHTS, "w": torch.tensor([[0.0, NAN], [0, 0]])}}),
            "model 'a': weight 'w' holds NaN or infinity",
        ),
        # by the right name, but of another kind
        (Bundle(scalars={"soft": 1.0}), "'soft', which this method does not exchange"),
        (Bundle(tensors={"loss": torch.zeros(1)}), "'loss', which this method does not exchange"),
        (Bundle(tensors={"bank": torch.zeros(C, D)}), "'bank', which this method does not exchange"),
        (Bundle(banks={"bank": bank()}), "'bank', which this method does not exchange"),
        (Bundle(banks={"weights": bank()}), "'weights', which this method does not exchange"),
    ],
)
def test_what_was_not_asked_for_names_the_client_and_the_part(bundle: Bundle, says: str) -> None:
    refused(lambda: EXPECTED.check(bundle, "client 7"), "client 7: ", says)


def test_parts_a_method_does_not_exchange() -> None:
    nothing = expecting(classes=C, dim=D)
    refused(
        lambda: nothing.check(Bundle(bank()), "client 7"), "client 7: sent 'bank', which this method does not exchange"
    )
    refused(lambda: nothing.check(Bundle(weights=WEIGHTS), "client 7"), "client 7: sent 'weights'")
    refused(lambda: nothing.check(Bundle(models={"a": WEIGHTS}), "client 7"), "client 7: sent 'models'")
    nothing.check(Bundle(), "client 7")


def test_what_comes_up_is_not_what_goes_down() -> None:
    exchange = Exchange(down=(wire.bank(),), up=(wire.weights(),))
    down, up = (exchange.expected(way, {"classes": C, "dim": D}, WEIGHTS) for way in ("down", "up"))
    down.check(Bundle(bank()), "server")
    up.check(Bundle(weights=WEIGHTS, scalars={"samples": 3.0}), "client 7")
    refused(lambda: down.check(Bundle(bank(), weights=WEIGHTS), "server"), "sent 'weights'")
    refused(lambda: down.check(Bundle(bank(), scalars={"samples": 3.0}), "server"), "sent 'samples'")
    refused(lambda: up.check(Bundle(bank(), weights=WEIGHTS), "client 7"), "sent 'bank'")
    silent = Exchange().expected("up", {}, {})
    silent.check(Bundle(), "client 7")
    refused(lambda: silent.check(Bundle(scalars={"samples": 3.0}), "client 7"), "sent 'samples'")


def test_a_part_of_the_weights() -> None:
    """Names that do not begin with the prefix are neither needed nor taken."""
    template = {"w": torch.zeros(2), "psi.w": torch.zeros(2)}
    half = expecting(wire.weights(prefix="psi."), template=template)
    half.check(Bundle(weights={"psi.w": torch.ones(2)}), "client 7")
    refused(lambda: half.check(Bundle(weights=template), "client 7"), "weight 'w' was not asked for")
    refused(lambda: half.check(Bundle(weights={"w": torch.ones(2)}), "client 7"), "client 7: weight 'psi.w' is missing")


def test_negative_counts_over_the_wire() -> None:
    message = crafted({"": [C, D]}, bank_entries(torch.ones(1, D), [1], [-2.0]))
    refused(lambda: decode(message, "client 7", EXPECTED), "client 7: bank has a negative count")


def test_parts_that_must_be_there() -> None:
    exchange = Exchange(up=(wire.bank(), wire.weights(), wire.number("loss", optional=True)))
    needs = exchange.expected("up", {"classes": C, "dim": D}, WEIGHTS)
    size = {"samples": 3.0}
    needs.check(Bundle(bank(), weights=WEIGHTS, scalars=size), "client 7")
    needs.check(Bundle(bank(), weights=WEIGHTS, scalars={**size, "loss": 0.5}), "client 7")
    refused(lambda: needs.check(Bundle(bank(), scalars=size), "client 7"), "client 7: sent no weights")
    refused(lambda: needs.check(Bundle(weights=WEIGHTS, scalars=size), "client 7"), "client 7: sent no bank")
    refused(lambda: needs.check(Bundle(bank(), weights=WEIGHTS), "client 7"), "client 7: sent no samples")
    other = Bundle(weights=WEIGHTS, banks={"bank": bank()}, scalars=size)
    refused(lambda: needs.check(other, "client 7"), "client 7: ")
    partial = replace(needs, partial=True)  # what is sent for an evaluation
    partial.check(Bundle(bank()), "client 7")
    refused(lambda: partial.check(Bundle(bank(NAN)), "client 7"), "bank holds NaN")


@QUICK
@given(BUNDLES)
def test_any_bundle_is_accepted_or_refused_in_one_line(bundle: Bundle) -> None:
    try:
        EXPECTED.check(bundle, "client 7")
    except WireError as error:
        assert str(error).startswith("client 7: ") and "\n" not in str(error)


def test_nothing_to_say_travels_as_nothing() -> None:
    assert encode(Bundle()) == b""
    assert decode(b"").empty
    assert sum(sizes(b"").values()) == 0
    needed = expecting(wire.bank(), classes=3, dim=2)
    refused(lambda: decode(b"", "client 7", needed), "client 7: ")


# --- many at once -----------------------------------------------------------------------------------------------------


def one_by_one(messages: list[bytes], expected: Expected | None) -> list[Bundle | WireError]:
    result: list[Bundle | WireError] = []
    for k, message in enumerate(messages):
        try:
            result.append(decode(message, f"client {k}", expected))
        except WireError as error:
            result.append(error)
    return result


def read_as_one_by_one(messages: list[bytes], expected: Expected | None = None) -> None:
    together = wire.decode_each(messages, [f"client {k}" for k in range(len(messages))], expected)
    for got, wanted in zip(together, one_by_one(messages, expected), strict=True):
        if isinstance(wanted, WireError):
            assert str(got) == str(wanted)
        else:
            assert isinstance(got, Bundle)
            same_bundle(got, wanted)


def rolled(bundle: Bundle, k: int) -> Bundle:
    """Of the same structure: other classes known, other numbers."""
    banks = {n: PrototypeBank(b.means.roll(k, -2), b.counts.roll(k, -1)) for n, b in bundle.banks.items()}
    main = bundle.bank and PrototypeBank(bundle.bank.means.roll(k, -2), bundle.bank.counts.roll(k, -1))
    weights, tensors = ({n: v.roll(k) for n, v in part.items()} for part in (bundle.weights, bundle.tensors))
    models = {name: {n: v.roll(k) for n, v in own.items()} for name, own in bundle.models.items()}
    return Bundle(main, banks, weights, tensors, {n: v / 2**k for n, v in bundle.scalars.items()}, models)


@QUICK
@given(st.lists(BUNDLES, min_size=1, max_size=3), st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255))))
@pytest.mark.slow
def test_messages_read_together_are_those_read_one_by_one(bundles: list[Bundle], flips: list[tuple[int, int]]) -> None:
    messages = [encode(rolled(bundle, k)) for k in range(3) for bundle in bundles]
    read_as_one_by_one(messages)
    for where, change in flips[:4]:
        if broken := bytearray(messages[where % len(messages)]):
            broken[where % len(broken)] ^= change
            messages[where % len(messages)] = bytes(broken)
    read_as_one_by_one(messages)


@pytest.mark.parametrize("wrong", [bank(NAN), bank(1.0, INF), bank(torch.tensor([[1.0], [INF], [1.0]]))])
def test_one_bad_message_among_many_is_named(wrong: PrototypeBank) -> None:
    good = [encode(Bundle(bank(k + 1.0), weights=WEIGHTS)) for k in range(4)]
    read_as_one_by_one([*good, encode(Bundle(wrong, weights=WEIGHTS))], EXPECTED)
    read_as_one_by_one([*good, good[0][:-1], b"", b"", good[1] + b"0"], EXPECTED)
    rows = bank_entries(torch.ones(2, D), [1, 2], [1.0, 1.0])
    bad = [
        bank_entries(torch.ones(2, D), *at) for at in ([[2, 1], [1.0, 1.0]], [[1, 3], [1.0, 1.0]], [[1, 2], [1.0, -1]])
    ]
    read_as_one_by_one([crafted({"": [C, D]}, entries) for entries in (rows, *bad, rows)], EXPECTED)


def test_what_was_read_together_may_be_written_to() -> None:
    first, second = wire.decode_each([encode(Bundle(bank(1.0))), encode(Bundle(bank(2.0)))], ["a", "b"], EXPECTED)
    assert isinstance(first, Bundle) and isinstance(second, Bundle) and first.bank and second.bank
    first.bank.means.zero_()
    assert second.bank.means.eq(2).all()


# --- weights that are read together -----------------------------------------------------------------------------------
def test_weights_of_messages_read_together_are_those_of_each():
    """As one matrix where they lie as one; integers beside floating weights, scalars and banks do not."""
    from protofed.federation.guard import norms_of
    from protofed.wire.stacked import WeightsRow

    def content(k, **more):
        g = torch.Generator().manual_seed(k)
        weights = {
            "b": torch.randn(3, generator=g),
            "a.w": torch.randn(2, 4, generator=g),
            "c": torch.randn((), generator=g),
        }
        return Bundle(bank=bank(), weights=weights | more, tensors={"t": torch.ones(2)}, scalars={"samples": float(k)})

    plain = [content(k) for k in range(4)]
    decoded = wire.decode_each([encode(b) for b in plain], list("abcd"), summed={"weights"})
    for bundle, original in zip(decoded, plain, strict=True):
        assert isinstance(bundle.weights, WeightsRow) and set(bundle.weights) == set(original.weights)
        assert all(torch.equal(bundle.weights[name], value) for name, value in original.weights.items())
        assert torch.equal(bundle.weights.flat, torch.cat([bundle.weights[n].reshape(-1) for n in bundle.weights]))
        assert norms_of(bundle)["weights"] == pytest.approx(norms_of(original)["weights"], rel=1e-5)
        assert encode(bundle) == encode(original)
    kept = wire.decode_each([encode(b) for b in plain], list("abcd"))  # what a server keeps is a tree of tensors
    assert all(type(bundle.weights) is dict for bundle in kept)
    huge = wire.decode_each([encode(Bundle(weights={"w": torch.full((4,), 1e30)}))] * 2, list("ab"), summed={"weights"})
    assert huge[0].weights.norm == pytest.approx(2e30, rel=1e-5)
    mixed = wire.decode_each(
        [encode(content(k, n=torch.tensor([k]))) for k in range(3)], list("abc"), summed={"weights"}
    )
    assert [int(bundle.weights["n"]) for bundle in mixed] == [0, 1, 2]
    assert not any(isinstance(bundle.weights, WeightsRow) for bundle in mixed)
