"""The papers' claims: the rule from differences to a verdict beside its own words, tests that read files, and the page."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.errors import ProtofedError
from protofed.experiment.claims import PAPERS, Evidence, Finding, claims_page, load_claims, read_claims, verdict_of
from protofed.experiment.claims.evidence import changed_column
from protofed.experiment.reproduce import load_preset
from protofed.results.archive import read_summaries
from protofed.results.columns import Column
from protofed.results.gains import Gain

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
T = {3: 4.302653, 4: 3.182446, 5: 2.776445}  # of Student's t, 97.5 %, by the number of seeds; from a printed table


def finding(values, stronger=False, **bounds):
    gain = Gain("a", "b", Column("x", "x"), dict(enumerate(values)), {}) if values else None
    return Finding("a", "b", stronger, gain, **bounds)


SHOWN, NOT_SHOWN, TOO_FEW, ABSENT = [1.0, 1.1, 1.2], [-1.0, 0.2, 1.3], [5.0, 5.1], []


# --- the rule ---------------------------------------------------------------------------------------------------------
@settings(deadline=None)  # the first interval loads scipy
@given(st.lists(st.floats(-9, 9), min_size=3, max_size=5), st.floats(-3, 3), st.floats(0.1, 5))
def test_what_a_difference_shows_by_hand(values, least, within):
    mean, half = statistics.fmean(values), T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    if abs(mean - half - least) > 1e-4:
        assert finding(values, least=least).shows == (mean - half > least)
    if abs(mean + half - least) > 1e-4:
        assert finding(values, least=least).opposes == (mean + half < least)
    if abs(abs(mean) + half - within) > 1e-4:
        assert finding(values, within=within).shows == (-within < mean - half and mean + half < within)
    if abs(abs(mean) - half - within) > 1e-4:
        assert finding(values, within=within).opposes == (mean - half > within or mean + half < -within)


@pytest.mark.parametrize(
    ("papers", "ours", "verdict"),
    [
        ([SHOWN, SHOWN], [], "holds"),
        ([SHOWN], [SHOWN], "holds"),
        ([SHOWN], [NOT_SHOWN], "only against a weaker baseline"),
        ([SHOWN], [SHOWN, NOT_SHOWN], "only against a weaker baseline"),
        ([SHOWN, NOT_SHOWN], [SHOWN], "holds in part"),
        ([NOT_SHOWN], [SHOWN], "does not hold here"),
        ([[-v for v in SHOWN]], [], "does not hold here"),
        ([TOO_FEW], [], "not measured yet"),
        ([ABSENT], [ABSENT], "not measured yet"),
        ([], [], "not measured yet"),
        ([SHOWN, TOO_FEW], [], "holds in part"),
        ([SHOWN, ABSENT], [SHOWN], "holds in part"),
        ([NOT_SHOWN, ABSENT], [], "does not hold here"),
        ([SHOWN], [ABSENT], "holds"),
        ([], [SHOWN], "holds"),
        ([ABSENT], [SHOWN], "holds in part"),
        ([ABSENT], [NOT_SHOWN], "does not hold here"),
    ],
)
def test_the_verdict(papers, ours, verdict):
    findings = [*(finding(v) for v in papers), *(finding(v, stronger=True) for v in ours)]
    for order in itertools.permutations(findings):
        assert verdict_of(order) == verdict
    assert verdict_of(findings, "no such data") == "cannot be tested here"


def test_what_is_counted_needs_no_seeds():
    assert finding([0.0], counted=True, within=0.0).shows and not finding([0.1], counted=True, within=0.0).shows
    assert finding([2.0], counted=True, least=1.0).shows and not finding([2.0], least=1.0).measured
    assert finding([0.5], counted=True, least=1.0).opposes and not finding([0.5], least=1.0).opposes


# --- the claims -------------------------------------------------------------------------------------------------------
def test_the_claims_are_sound():
    claims = [claim for paper in PAPERS for claim in load_claims(paper)]
    assert len(claims) >= 40 and len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.claim.endswith(".") and claim.where, claim.id


GOOD = """
[[claims]]
id = "X1"
where = "Table 1"
claim = "One is above the other."
[[claims.tests]]
preset = "fedsap/table1"
columns = ["CIFAR-10 n=3"]
better = "FedSAP"
worse = ["FedProto"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('preset = "fedsap/table1"', 'preset = "fedsap/tabel1"', "did you mean 'fedsap/table1'"),
        ('"FedSAP"', '"FedSAD"', "X1: unknown row 'FedSAD'"),
        ('["FedProto"]', '["FedProto @ here"]', "X1: unknown column 'here'"),
        ("n=3", "n=9", "X1: unknown column 'CIFAR-10 n=9'"),
        ('["FedProto"]', "[]", "expected rows to compare with"),
        ('preset = "fedsap/table1"', "", "expected a preset, or folders"),
        ('better = "FedSAP"', 'better = "FedSAP"\nmeasure = "acuracy"', "unknown column 'acuracy'"),
        ('where = "Table 1"', 'where = "Table 1"\ncannot = "no data"', "expected either tests, or in `cannot`"),
        ('where = "Table 1"', "", "where"),
        (GOOD, GOOD + GOOD, "claims with one id: X1"),
    ],
)
def test_a_wrong_claim_is_said_in_one_line(tmp_path, old, new, message):
    file = tmp_path / "x.toml"
    file.write_text(GOOD, encoding="utf-8")
    assert [claim.id for claim in read_claims(file)] == ["X1"]
    file.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ProtofedError, match=message) as error:
        read_claims(file)
    assert "\n" not in str(error.value)


# --- what is read from files ------------------------------------------------------------------------------------------
def by_hand(folder, better, worse, key, part="last_five"):
    """Differences from the file itself, seed by seed: nothing of the code that reads results but the JSON."""
    cells = json.loads((folder / "summaries.json").read_text())
    values = {
        name: [100 * cells[f"{name}-seed{seed}"][part][key] for seed in (1234, 1235, 1236)] for name in (better, worse)
    }
    return [a - b for a, b in zip(values[better], values[worse], strict=True)]


def read(tmp_path, text, results=RESULTS):
    file = tmp_path / "x.toml"
    file.write_text(text, encoding="utf-8")
    return Evidence(results).findings(read_claims(file)[0])


def test_a_difference_is_that_of_the_files(tmp_path):
    folder = RESULTS / "fedsap-table1-laptop/cifar-10-n-3"
    (found,) = read(tmp_path, GOOD)
    assert list(found.gain.by_seed.values()) == pytest.approx(by_hand(folder, "FedSAP", "FedProto", "accuracy_head"))
    assert found.source == "fedsap-table1-laptop/cifar-10-n-3" and not found.stronger
    own = GOOD.replace('"FedProto"]', '"FedSAP"]\nworse_measure = "accuracy_prototype"')
    (found,) = read(tmp_path, own)
    heads, others = (
        [
            100 * s["last_five"][f"accuracy_{kind}"]
            for name, s in read_summaries(folder).items()
            if name.startswith("FedSAP-")
        ]
        for kind in ("head", "prototype")
    )
    assert list(found.gain.by_seed.values()) == pytest.approx([a - b for a, b in zip(heads, others, strict=True)])
    (found,) = read(tmp_path, GOOD + 'less_in = "CIFAR-10 n=5"\n')
    more = by_hand(RESULTS / "fedsap-table1-laptop/cifar-10-n-5", "FedSAP", "FedProto", "accuracy_head")
    less = by_hand(folder, "FedSAP", "FedProto", "accuracy_head")
    assert list(found.gain.by_seed.values()) == pytest.approx([a - b for a, b in zip(less, more, strict=True)])
    (found,) = read(tmp_path, GOOD.replace("FedProto", "FedSAP @ CIFAR-10 n=5"))
    assert found.gain.mean > 5, "three classes are easier than five"


def test_a_folder_that_is_missing_is_not_measured_yet(tmp_path):
    (tmp_path / "results").mkdir()
    (found,) = read(tmp_path, GOOD, tmp_path / "results")
    assert found.gain is None and verdict_of([found]) == "not measured yet"
    assert found.command == "protofed reproduce fedsap/table1"
    text = GOOD.replace('preset = "fedsap/table1"\ncolumns = ["CIFAR-10 n=3"]', 'folders = ["nowhere"]')
    (found,) = read(tmp_path, text, tmp_path / "results")
    assert found.gain is None and not found.command
    page = claims_page(tmp_path / "results")  # counted tables need no files
    assert "### S8" in page and re.search(
        r"^\| \[S8\]\(#s8\) \|.*\*\*holds\*\*<br>3 of 3 show it \|$", page, flags=re.M
    )
    assert not re.search(r"^\| \[S1\]\(#s1\) \|.*\*\*holds", page, flags=re.M)


def test_the_row_of_one_round(tmp_path):
    text = GOOD.replace("fedsap/table1", "fedarpl/table1").replace("CIFAR-10 n=3", "CIFAR-10 250, IID")
    text = (
        text.replace("FedSAP", "Fed-ARPL").replace("FedProto", "SemiFL")
        + 'measure = "measures.acceptance"\nround = 2\n'
    )
    (found,) = read(tmp_path, text)
    assert found.seeds == 3 and 0.1 < found.gain.mean < 0.9 and "round 2" in found.heading


def test_settings_that_a_preset_has_otherwise_today(tmp_path):
    name, column = "fedsap/table4", "CIFAR-100 n=10"
    folder = RESULTS / "fedsap-table4-laptop/cifar-100-n-10"
    before = changed_column(load_preset(name), column, "laptop", folder)
    shutil.copytree(folder, tmp_path / "c")
    record = json.loads((folder / "comparison.json").read_text())
    cell = record["settings"]["neither-seed1234"]
    cell |= {"lr": 5.0, "threads": 99, "checkpoint_every": 3}  # of which the last two change no result
    del cell["rounds"]  # as if there had been no such setting, and today's value is not the default
    (tmp_path / "c/comparison.json").write_text(json.dumps(record))
    after = changed_column(load_preset(name), column, "laptop", tmp_path / "c")
    assert set(after) - set(before) == {"lr", "rounds"}


# --- the page ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def page():
    return claims_page(RESULTS)


def test_the_page_is_of_today(page):
    assert (ROOT / "docs/claims.md").read_text(encoding="utf-8") == page, "run: make evidence"


def test_the_page_has_every_claim_once_with_a_verdict(page):
    for paper in PAPERS:
        for claim in load_claims(paper):
            row = rf"^\| \[{claim.id}\]\(#{claim.id.lower()}\) \|.*\| \*\*([a-z ]+)\*\*.* \|$"
            (verdict,) = re.findall(row, page, flags=re.M)
            entry = re.search(rf"^### {claim.id}\n\n(.+?)(?=\n##|\Z)", page, flags=re.M | re.S)
            assert entry is not None and f"**{verdict.capitalize()}**." in entry[1], claim.id
            marks = Counter(re.findall(r"([✓✗○]) ", re.sub(r"[✓✗○] [^<|]*‡[^<|]*", "", entry[1])))
            if verdict == "holds":
                assert set(marks) <= {"✓"}, claim.id  # with the paper's rows; the stronger ones are left out
    overview = re.search(r"^\| all \| (.+) \|$", page, flags=re.M)
    assert overview is not None
    *verdicts, total = map(int, overview[1].split(" | "))
    assert sum(verdicts) == total == sum(len(load_claims(paper)) for paper in PAPERS)
    lost = [line for line in page.splitlines() if "**does not hold here**<br>" in line]
    against = sum("the opposite |" in line for line in lost)
    assert f"Of the {len(lost)} that do not hold here, {against} have a comparison that shows the opposite" in page


def test_a_column_that_is_not_run_by_default_is_named_in_its_command(page):
    assert "`protofed reproduce fedsap/table1`" in page  # whose columns are the default ones
    assert '`protofed reproduce fedarpl/cifar10 --only "250, IID"`' in page


def test_the_command(call, tmp_path):
    name = "protofssl-table9-laptop"
    shutil.copytree(RESULTS / name, tmp_path / "results" / name)
    code, out, err = call("claims", tmp_path / "results", "--out", tmp_path / "page.md")
    assert code == 0 and "page.md" in out, err
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert re.search(r"^\| \[F16\]\(#f16\) \|.*\*\*holds\*\*<br>1 of 1 show it \|$", text, flags=re.M)
    assert re.search(r"^\| .* \| ✓ σ none − σ 10 \+\d.* \|$", text, flags=re.M)
    assert f"- `{name}/svhn-iid`: fashion-mnist at 16 × 16, 20 clients" in text
    code, _, err = call("claims", tmp_path / "nowhere")
    assert code == 2 and "no such folder of results" in err


def test_what_evidence_makes_and_what_a_package_holds():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "reproduce --ledger docs/results" in text and "claims docs/results --out docs/claims.md" in text
    package = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"experiment/claims/*.toml"' in package and '"experiment/claims/*.md"' in package
