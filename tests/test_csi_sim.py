"""The simulated channel against its formulae, and what a person who counts people by it may rely on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from protofed.data import csi_sim, federate, load
from protofed.data.csi_sim import CARRIER, LIGHT, ROOMS, SHADOW, CSISimulation
from protofed.errors import ProtofedError

NAMES = [room.name for room in ROOMS]
SMALL = {"rooms": 2, "people": 2, "windows_per_class": 2, "packets": 20, "subcarriers": 8}


def made(**options: object) -> CSISimulation:
    return CSISimulation(**{**SMALL, **options})  # type: ignore[arg-type]


# --- the data set -----------------------------------------------------------------------------------------------------
def test_shapes_labels_and_names() -> None:
    data = load("csi-sim", standardise=False, **SMALL)
    assert data.x_train.shape == (12, 1, 20, 8) and data.x_train.dtype == torch.float32
    assert data.y_train.tolist() == [0, 0, 1, 1, 2, 2] * 2 and data.num_classes == 3
    assert data.group_train is not None and data.group_train.tolist() == [0] * 6 + [1] * 6
    assert data.group_names == ("hotel-room", "living-room") and data.class_values == (0, 1, 2)
    assert data.x_test is None and float(data.x_train.min()) >= 0
    data.check()


def test_rooms_hold_different_numbers_of_people() -> None:
    data = made(rooms=6, people=20, windows_per_class=1, packets=2, subcarriers=2).read()
    assert data.group_train is not None and data.num_classes == 21
    for room, about in enumerate(ROOMS):
        own = data.y_train[data.group_train == room]
        assert own.tolist() == list(range(about.people[0], about.people[1] + 1))
    assert len({about.people for about in ROOMS}) == 6
    few = made(rooms=6, people=3, windows_per_class=1, packets=2, subcarriers=2).read()
    assert few.num_classes == 4 and few.group_train is not None
    assert few.y_train[few.group_train == NAMES.index("bus")].tolist() == [3], "never none, whatever the limit"


def test_by_default_it_is_below_100_mb() -> None:
    default = CSISimulation()
    windows = default.windows_per_class * sum(high - low + 1 for low, high in (room.people for room in ROOMS))
    assert 4 * windows * default.packets * default.subcarriers < 100e6


def test_the_same_seed_gives_the_same_data_and_another_does_not() -> None:
    one, again, other = made().read(), made().read(), made(seed=1).read()
    assert torch.equal(one.x_train, again.x_train)
    assert (one.x_train != other.x_train).all()


def test_asking_for_more_leaves_what_was_there() -> None:
    base = made().read().x_train
    assert torch.equal(made(rooms=1).read().x_train, base[:6])
    more = made(windows_per_class=3).read().x_train
    assert torch.equal(more[[0, 1, 3, 4, 6, 7]], base[:6])
    assert torch.equal(made(rooms=1, people=4).read().x_train[:6], base[:6])


def test_windows_of_one_class_are_not_near_duplicates() -> None:
    x = made(windows_per_class=6, packets=100, subcarriers=16).windows(0, 2)
    moving = (x - x.mean(axis=1, keepdims=True)).reshape(6, -1)
    between = np.corrcoef(moving)[~np.eye(6, dtype=bool)]
    assert np.abs(between).max() < 0.6


def test_one_client_for_each_room() -> None:
    federated = federate(load("csi-sim", **{**SMALL, "windows_per_class": 5}), "natural", seed=1, test="local")
    assert [len(client.labelled) for client in federated.clients] == [12, 12]
    assert [len(client.test) for client in federated.clients] == [3, 3]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rooms", 0),
        ("rooms", 7),
        ("people", 0),
        ("people", 21),
        ("windows_per_class", 0),
        ("packets", 1),
        ("subcarriers", 0),
        ("subcarriers", 243),
        ("rate", 0),
        ("rate", "inf"),
        ("noise", "nan"),
        ("seed", -1),
    ],
)
def test_settings_that_are_not_right(setting: str, value: object) -> None:
    with pytest.raises(ProtofedError) as caught:
        load("csi-sim", **{setting: value})
    assert f"{setting} must be" in str(caught.value) and str(value) in str(caught.value)


# --- the formulae -----------------------------------------------------------------------------------------------------
def test_the_channel_is_the_sum_over_its_paths() -> None:
    rng = np.random.default_rng(0)
    amplitude, delay = rng.uniform(0.1, 1, (3, 4)), rng.uniform(1e-9, 1e-7, (3, 4))
    frequencies = made(subcarriers=5).frequencies
    found = csi_sim.response(amplitude, delay, frequencies)
    for t in range(4):
        for k, f in enumerate(frequencies):
            naive = sum(amplitude[p, t] * np.exp(-2j * np.pi * f * delay[p, t]) for p in range(3))
            assert found[t, k] == pytest.approx(naive, abs=1e-9)
    assert csi_sim.response(amplitude, delay, frequencies[:1]).shape == (4, 1)


def test_subcarriers_span_80_mhz() -> None:
    frequencies = made(subcarriers=242).frequencies
    assert len(frequencies) == 242 and frequencies.mean() == pytest.approx(CARRIER)
    assert frequencies[-1] - frequencies[0] == pytest.approx(2 * 122 * 312_500)


@pytest.mark.parametrize("room", ROOMS, ids=NAMES)
def test_paths_by_way_of_a_place(room: csi_sim.Room) -> None:
    place = np.array([0.37, 0.61]) * room.size
    amplitude, delay = csi_sim.scattered(room, place[None, None], np.array([0.2]))
    there = np.hypot(*(place - room.sender))
    width, depth = room.size
    x, y = room.receiver
    for path, (end, left) in enumerate(
        [((x, y), 1.0)]
        + [(end, room.reflectivity) for end in ((-x, y), (2 * width - x, y), (x, -y), (x, 2 * depth - y))]
    ):
        on = np.hypot(*(place - end))
        assert amplitude[path, 0] == pytest.approx(left * 0.2 / (there * on))
        assert delay[path, 0] == pytest.approx((there + on) / LIGHT)


def test_people_cast_shadows_more_on_long_paths() -> None:
    room = ROOMS[0]
    delay = np.array([[10 / LIGHT], [20 / LIGHT]])
    found, same = csi_sim.shadowed(room, 3, np.ones((2, 1)), delay)
    assert same is delay
    np.testing.assert_allclose(found[:, 0], np.exp(-3 * SHADOW * np.array([10, 20]) / (room.size[0] * room.size[1])))
    np.testing.assert_array_equal(csi_sim.shadowed(room, 0, np.ones((2, 1)), delay)[0], 1)


@pytest.mark.parametrize("room", ROOMS, ids=NAMES)
def test_people_walk_within_the_room_at_their_pace(room: csi_sim.Room) -> None:
    source = made(packets=400, rate=50.0)
    places = source.walk(room, 20, np.random.default_rng(0))
    assert places.shape == (20, 400, 2)
    assert (places >= 0).all() and (places <= room.size).all()
    speed = np.linalg.norm(np.diff(places, axis=1), axis=2) * 50
    assert (speed <= 1.4 * room.speed * (1 + 1e-9)).all(), "a wall only slows a step down"
    pace = np.median(speed, axis=1)
    assert (pace >= 0.6 * room.speed * (1 - 1e-9)).all() and np.ptp(pace) > 0.3 * room.speed
    assert 0.8 < pace.mean() / room.speed < 1.2


@pytest.mark.parametrize("speed", [0.4, 0.8, 1.2])
def test_doppler_of_one_who_walks_away(speed: float) -> None:
    """A person who walks straight away from sender and receiver lengthens the path by 2v a second."""
    rate, seconds = 200, 5
    time = np.arange(rate * seconds) / rate
    delay = np.stack([np.full_like(time, 10 / LIGHT), (6 + 2 * speed * time) / LIGHT])
    amplitude = np.array([[1.0], [0.1]]) * np.ones_like(time)
    seen = np.abs(csi_sim.response(amplitude, delay, np.array([CARRIER]))[:, 0])
    spectrum = np.abs(np.fft.rfft(seen - seen.mean()))
    expected = 2 * speed * CARRIER / LIGHT
    assert np.fft.rfftfreq(len(seen), 1 / rate)[spectrum.argmax()] == pytest.approx(expected, abs=1 / seconds)


@pytest.mark.parametrize("index", range(6), ids=NAMES)
def test_doppler_is_within_what_the_fastest_can_cause(index: int) -> None:
    room, source = ROOMS[index], made(packets=512, rate=200.0)
    doppler = np.abs(np.fft.fftfreq(512, 1 / 200))
    bandwidths = []
    for slower in (1.0, 0.5):
        paced = room._replace(speed=room.speed * slower)
        power = np.zeros(512)
        for draw in range(30):  # one draw is ruled by whoever is next to an antenna
            places = source.walk(paced, 6, np.random.default_rng(draw))
            paths = csi_sim.scattered(paced, places, np.full(6, 0.12))
            channel = csi_sim.response(*paths, np.array([CARRIER]))[:, 0]
            power += np.abs(np.fft.fft((channel - channel.mean()) * np.hanning(512))) ** 2
        limit = 2 * 1.4 * paced.speed * CARRIER / LIGHT
        assert power[doppler > limit + 2].sum() < 0.002 * power.sum()
        bandwidths.append(np.sqrt((power * doppler**2).sum() / power.sum()))
    assert 1.6 < bandwidths[0] / bandwidths[1] < 2.4, "twice the speed, about twice the bandwidth"


@pytest.mark.parametrize("index", [i for i, room in enumerate(ROOMS) if room.people[0] == 0])
@pytest.mark.parametrize("noise", [-40.0, -20.0])
def test_an_empty_room_varies_by_noise_alone(monkeypatch: pytest.MonkeyPatch, index: int, noise: float) -> None:
    """Of complex noise of power σ², half is along the channel: the amplitude's variance is σ²/2 where it is strong."""
    monkeypatch.setattr(csi_sim, "JITTER", 0.0)
    source, room = made(packets=3000, subcarriers=32, noise=noise, windows_per_class=1), ROOMS[index]
    x = source.windows(index, 0)[0]
    still = np.abs(source.still(index, 0))
    still /= np.sqrt(np.mean(still**2))
    strong = still > 1
    power = 10 ** ((noise + room.noise) / 10)
    expected = room.gain**2 * power / 2 / (1 + power)
    assert x[:, strong].var(axis=0).mean() == pytest.approx(expected, rel=0.15)
    assert source.windows(index, 2)[0].var(axis=0).mean() > (2 if noise == -40 else 1) * expected


def test_gain_control_levels_packets() -> None:
    rng = np.random.default_rng(0)
    loud = rng.uniform(1, 2, (500, 16)) * np.logspace(-2, 2, 500)[:, None]
    found = csi_sim.controlled(loud, 1.5, rng)
    strength = np.sqrt((found**2).mean(axis=1))
    assert strength.mean() == pytest.approx(1.5, rel=0.01)
    assert strength.std() / strength.mean() == pytest.approx(csi_sim.JITTER, rel=0.2)


# --- what may be learnt from it ---------------------------------------------------------------------------------------
def features(x: np.ndarray) -> np.ndarray:
    """How much each eighth subcarrier varies, how fast, and the mean over time."""
    mean = x.mean(axis=1)
    change = (x - mean[:, None]) / mean[:, None].clip(1e-2)
    power = np.abs(np.fft.rfft(change, axis=1)) ** 2
    edges = [1, 3, 6, 12, 25, power.shape[1]]
    bands = np.stack([power[:, a:b].mean(axis=(1, 2)) for a, b in pairwise(edges)], axis=1)
    profile = np.log(mean / np.sqrt((mean**2).mean(axis=1, keepdims=True)))
    return np.concatenate([np.log(bands), np.log(change.var(axis=1))[:, ::8], profile[:, ::4]], axis=1)


def classifier() -> LogisticRegression:
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))


def in_room(index: int, counts: range, windows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels, and what is predicted of each window by the others."""
    source = CSISimulation(windows_per_class=windows, packets=100)
    x = features(np.concatenate([source.windows(index, people) for people in counts]))
    y = np.repeat(np.array(counts), windows)
    return x, y, cross_val_predict(classifier(), x, y, cv=StratifiedKFold(4, shuffle=True, random_state=0))


def part(rooms: list[np.ndarray], start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows `start … stop` of each count, and their counts."""
    return np.concatenate([x[start:stop] for x in rooms]), np.repeat(np.arange(len(rooms)), stop - start)


@pytest.mark.parametrize(("index", "needed"), [(0, 0.8), (1, 0.6)])
@pytest.mark.slow
def test_small_rooms_are_learnable_and_more_windows_help(index: int, needed: float) -> None:
    source = CSISimulation(windows_per_class=80, packets=100)
    own = [features(source.windows(index, people)) for people in range(ROOMS[index].people[1] + 1)]
    x, y = part(own, 48, 80)
    few, many = (classifier().fit(*part(own, 0, windows)).predict(x) for windows in (8, 48))
    assert (many == y).mean() > needed > 3 / len(own)
    assert (np.abs(many - y) <= 1).mean() > 0.95
    assert (many == y).mean() > (few == y).mean() + 0.05


@pytest.mark.slow
def test_more_people_are_harder_to_count() -> None:
    room = NAMES.index("classroom")
    _, y, found = in_room(room, range(21), 16)
    few, many = y <= 5, y >= 15
    error = np.abs(found - y)
    assert (error[few] == 0).mean() > (error[many] == 0).mean() + 0.1
    assert error[few].mean() < 0.8 * error[many].mean()
    assert error.mean() < 3 < np.abs(y - 10).mean(), "far better than always ten"


def test_more_people_change_the_channel_more() -> None:
    source = CSISimulation(windows_per_class=12, packets=100)
    for index in (0, 3, 5):
        change = [np.log(source.windows(index, people).var(axis=1)).mean() for people in (0, 1, 4)]
        assert change[0] < change[1] < change[2], NAMES[index]


@pytest.mark.slow
def test_rooms_are_different() -> None:
    own = {index: in_room(index, range(5), 24) for index in (0, 1, 2, 3)}
    for index, (x, y, found) in own.items():
        model = classifier().fit(x, y)
        inside = (found == y).mean()
        outside = np.mean(
            [(model.predict(other) == labels).mean() for k, (other, labels, _) in own.items() if k != index]
        )
        assert inside > outside + 0.25, (NAMES[index], inside, outside)


def test_a_room_is_known_by_its_static_profile() -> None:
    source = CSISimulation(windows_per_class=4, packets=50)
    x = np.stack([source.windows(index, 4).mean(axis=1) for index in range(6)])
    x /= np.sqrt((x**2).mean(axis=2, keepdims=True))  # whatever the gain
    means = x[:, :2].mean(axis=1)
    nearest = ((x[:, 2:, None] - means) ** 2).sum(axis=-1).argmin(axis=-1)
    assert (nearest == np.arange(6)[:, None]).all()


# --- the page ---------------------------------------------------------------------------------------------------------
def test_the_page_has_the_rooms_as_they_are() -> None:
    page = (Path(__file__).parent.parent / "docs" / "wifi-csi.md").read_text(encoding="utf-8")
    for room in ROOMS:
        (width, depth), (low, high) = room.size, room.people
        sender, receiver = (", ".join(map(str, place)) for place in (room.sender, room.receiver))
        row = (
            f"| `{room.name}` | {width} × {depth} | {sender} | {receiver} | {room.reflectivity} | {room.scatterers} "
            f"| {room.speed} | {room.noise:+g} | {room.gain} | {low}–{high} |"
        )
        assert row in page, row
    for name in ("BODY", "SHADOW", "JITTER"):
        assert f"| `{name}` | {getattr(csi_sim, name)} |" in page
