"""A comparison that is packed into few files reads as it did before."""

import json
import shutil
from dataclasses import replace

import pytest

import protofed as pf
from protofed.errors import ProtofedError
from protofed.report.content import content
from protofed.results.archive import is_archive, pack, read_archive, unpack
from protofed.results.read import read_folder, read_rows
from support.run_folders import make_comparison
from support.small import SMALL

QUICK = {**SMALL, "clients": 3, "data": "digits", "hidden": [8]}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    place = tmp_path_factory.mktemp("archive") / "c"
    pf.compare(["fedproto", "short=fedavg?rounds=2"], seeds=2, out=place, jobs=1, **QUICK)
    return place


def plain(folder):
    """What was read, without the place it was read from."""
    variants = [
        replace(v, runs=[replace(run, path=run.path.name, archived_confusions=None) for run in v.runs])
        for v in folder.variants
    ]
    return replace(folder, path=None, variants=variants)


def test_an_archive_reads_as_the_folder_does(compared, tmp_path):
    files = pack(compared, tmp_path / "a")
    assert {file.name for file in files} == {"comparison.json", "rows.jsonl.xz", "summaries.json", "table.md"}
    before, after = read_folder(compared), read_folder(tmp_path / "a")
    assert plain(before) == plain(after) and len(after.runs) == 6
    for one, other in zip(before.runs, after.runs, strict=True):
        confusions = one.confusions(), other.confusions()
        assert confusions[0].clients == confusions[1].clients and confusions[0].round == confusions[1].round
    assert read_rows(compared) == read_rows(tmp_path / "a")
    shown = [
        {k: v for k, v in content(place).items() if k not in ("title", "folder", "spaces")}
        for place in (compared, tmp_path / "a")
    ]
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_commands_read_an_archive(call, compared, tmp_path):
    assert call("pack", compared, "a")[0] == 0
    assert call("table", "a")[1] == call("table", compared)[1]
    code, out, _ = call("confusion", "a/fedproto-seed1234", "--picture", "p.png")
    assert code == 0 and "client 0" in out and (tmp_path / "p.png").is_file()
    code, _, err = call("confusion", "a")
    assert code == 2 and "this is a comparison; name one of its runs" in err and "a/fedproto-seed1234" in err
    assert call("report", "a", "--out", "page.html")[0] == 0
    code, _, err = call("pack", compared, "a")
    assert code == 2 and "exists already" in err
    code, _, err = call("pack", "a/nowhere", "b")
    assert code == 2 and "not a comparison's folder" in err


def test_an_archive_of_a_comparison_under_way(tmp_path):
    place = make_comparison(tmp_path / "c")
    (place / "fedavg-seed2" / "summary.json").unlink()
    shutil.rmtree(place / "fedavg-seed3")
    pack(place, tmp_path / "a")
    before, after = read_folder(place), read_folder(tmp_path / "a")
    assert plain(before) == plain(after)
    assert [len(v.finished) for v in after.variants] == [3, 3, 1]


def test_an_archive_is_unpacked_into_what_it_was_made_of(compared, tmp_path):
    pack(compared, tmp_path / "a")
    unpack(tmp_path / "a")
    assert not is_archive(tmp_path / "a")
    assert plain(read_folder(tmp_path / "a")) == plain(read_folder(compared))
    for run in compared.glob("*-seed*"):
        for name in ("settings.toml", "rounds.jsonl", "metrics.jsonl", "clients.jsonl"):
            assert (tmp_path / "a" / run.name / name).read_bytes() == (run / name).read_bytes()
        for name in ("summary.json", "confusion.json"):
            stored, original = (json.loads((place / name).read_text()) for place in (tmp_path / "a" / run.name, run))
            assert stored == original
    pack(tmp_path / "a", tmp_path / "again")
    assert plain(read_folder(tmp_path / "again")) == plain(read_folder(compared))


def test_a_damaged_archive_is_not_unpacked(compared, tmp_path):
    pack(compared, tmp_path / "a")
    file = tmp_path / "a/rows.jsonl.xz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ProtofedError, match="not readable"):
        unpack(tmp_path / "a")
    assert is_archive(tmp_path / "a") and not list((tmp_path / "a").glob("*seed*"))


def test_an_unfinished_run_is_left_out_of_what_is_unpacked(tmp_path):
    place = make_comparison(tmp_path / "c")
    (place / "fedavg-seed2" / "summary.json").unlink()
    pack(place, tmp_path / "a")
    unpack(tmp_path / "a")
    assert not (tmp_path / "a/fedavg-seed2").exists() and (tmp_path / "a/fedavg-seed1/summary.json").is_file()


@pytest.mark.parametrize("name", ["rows.jsonl.xz", "summaries.json"])
def test_a_damaged_archive_is_one_line(name, compared, tmp_path):
    pack(compared, tmp_path / "a")
    file = tmp_path / "a" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ProtofedError, match=f"{name}: not readable"):
        read_archive(tmp_path / "a")


def test_a_changed_summary_is_noticed(compared, tmp_path):
    pack(compared, tmp_path / "a")
    file = tmp_path / "a" / "summaries.json"
    summaries = json.loads(file.read_text())
    summaries["fedproto-seed1234"]["last_five"]["accuracy_head"] = 0.99
    file.write_text(json.dumps(summaries))
    with pytest.raises(ProtofedError, match=r"fedproto-seed1234/summary.json: .*damaged"):
        read_rows(tmp_path / "a")
    assert any("damaged" in note for note in read_folder(tmp_path / "a").notes())
