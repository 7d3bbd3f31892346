"""MIMIC-IV discharge disposition, on made-up rows in the official files' columns. No row is of a real patient."""

from __future__ import annotations

import csv
import gzip
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import protofed.data.mimic as mimic
from protofed.data import Dataset, sources
from protofed.data.text import tokens
from support.errors import refusal

ADMISSIONS = [
    "subject_id",
    "hadm_id",
    "admittime",
    "dischtime",
    "deathtime",
    "admission_type",
    "admit_provider_id",
    "admission_location",
    "discharge_location",
    "insurance",
    "language",
    "marital_status",
    "race",
    "edregtime",
    "edouttime",
    "hospital_expire_flag",
]
DISCHARGE = ["note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text"]
NOTES = ["note_id", "input", "target", "input_tokens", "target_tokens"]


pytestmark = pytest.mark.usefixtures("home")


def write(file: Path, columns: list[str], rows: list[dict[str, Any]]) -> str:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wt", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


class Made:
    """Stays of made-up patients, written as the three files."""

    def __init__(self, folder: Path, gz: bool = True) -> None:
        self.folder, self.gz = folder, gz
        self.admissions: list[dict[str, Any]] = []
        self.discharge: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []

    def stay(self, patient: int, number: int, location: str, died: int = 0, text: str | None = None) -> None:
        stay, note = 20000000 + len(self.admissions), f"{patient}-DS-{number}"
        self.admissions.append(
            {
                "subject_id": patient,
                "hadm_id": stay,
                "admission_type": "EW EMER.",
                "discharge_location": location,
                "hospital_expire_flag": died,
            }
        )
        self.discharge.append(
            {
                "note_id": note,
                "subject_id": patient,
                "hadm_id": stay,
                "note_type": "DS",
                "note_seq": number,
                "text": " \nName:  ___\nDischarge Disposition:\nmade up\n",
            }
        )
        text = f"<SEX> F <SERVICE> MEDICINE,\n<HISTORY> case {note}" if text is None else text
        self.notes.append({"note_id": note, "input": text, "target": "", "input_tokens": 9, "target_tokens": 1})

    def load(self, **options: Any) -> Dataset:
        gz = ".gz" if self.gz else ""
        paths = {
            "notes": write(self.folder / "mimic-iv-bhc.csv", NOTES, self.notes),
            "discharge": write(self.folder / f"discharge.csv{gz}", DISCHARGE, self.discharge),
            "admissions": write(self.folder / f"admissions.csv{gz}", ADMISSIONS, self.admissions),
        }
        return sources.make("mimic-disposition", {"length": 16, **paths, **options}).load()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def everything(data: Dataset) -> dict[tuple[int, ...], str]:
    """Tokens → class name, of both parts."""
    assert data.x_test is not None and data.y_test is not None
    rows = zip(
        [*data.x_train.tolist(), *data.x_test.tolist()], [*data.y_train.tolist(), *data.y_test.tolist()], strict=True
    )
    return {tuple(x): data.class_names[y] for x, y in rows}


@pytest.mark.parametrize("gz", [True, False])
def test_every_location_and_its_class(tmp_path: Path, gz: bool) -> None:
    expected = {
        "HOME": "Home",
        "HOME HEALTH CARE": "Home Health",
        "SKILLED NURSING FACILITY": "SNF",
        "REHAB": "Rehab",
        "DIED": "Expired",
        "CHRONIC/LONG TERM ACUTE CARE": "Other",
        "HOSPICE": "Other",
        "PSYCH FACILITY": "Other",
        "ACUTE HOSPITAL": "Other",
        "AGAINST ADVICE": "Other",
        "ASSISTED LIVING": "Other",
        "OTHER FACILITY": "Other",
        "HEALTHCARE FACILITY": "Other",
    }
    assert expected == mimic.DISPOSITION
    made = Made(tmp_path, gz)
    for i, location in enumerate(expected):
        made.stay(10000000 + i, 5, location)
    data = made.load()
    assert data.class_names == ("Home", "Home Health", "SNF", "Rehab", "Expired", "Other") and data.num_classes == 6
    found = everything(data)
    for row, label in zip(made.notes, expected.values(), strict=True):
        assert found[tuple(tokens([row["input"]], "hash:8192", 16)[0].tolist())] == label


def test_who_died_in_hospital_expired_whatever_the_location(made: Made) -> None:
    made.stay(10000001, 1, "HOME", died=1)
    made.stay(10000002, 1, "", died=1)
    made.stay(10000003, 1, "HOME")
    assert sorted(everything(made.load()).values()) == ["Expired", "Expired", "Home"]


def test_a_note_is_joined_by_its_stay_not_by_its_patient(made: Made) -> None:
    made.stay(10000001, 21, "HOME", text="first stay")
    made.stay(10000001, 3, "REHAB", text="second stay")
    made.stay(10000002, 1, "HOME", text="somebody else")
    made.admissions.reverse()
    found = everything(made.load())
    for text, label in (("first stay", "Home"), ("second stay", "Rehab"), ("somebody else", "Home")):
        assert found[tuple(tokens([text], "hash:8192", 16)[0].tolist())] == label


def test_seventy_to_thirty_by_patient(made: Made) -> None:
    for patient in range(100):
        for number in range(3):
            made.stay(10000000 + patient, number, "HOME" if number else "REHAB")
    data = made.load()
    assert len(data.x_train) == 210 and data.x_test is not None and len(data.x_test) == 90
    again = made.load()
    assert torch.equal(data.x_train, again.x_train), "the same split every time"
    rows = {tuple(tokens([r["input"]], "hash:8192", 16)[0].tolist()): r["note_id"].split("-")[0] for r in made.notes}
    train, test = ({rows[tuple(x)] for x in part.tolist()} for part in (data.x_train, data.x_test))
    assert not train & test and len(train) == 70 and len(test) == 30
    assert len(made.load(test_share=0.5).x_train) == 150


def test_what_has_no_label_is_left_out_and_counted(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    for patient in range(4):
        made.stay(10000000 + patient, 1, "HOME")
    made.stay(10000010, 1, "")
    made.stay(10000011, 1, "")
    made.stay(10000012, 1, "HOME", text="  ")
    made.stay(10000013, 1, "HOME")
    made.discharge.pop()
    with caplog.at_level(logging.WARNING, "protofed"):
        data = made.load()
    assert len(everything(data)) == 4
    for said in ("2 notes have no discharge location", "1 notes are empty", "1 notes are not in the discharge table"):
        assert said in caplog.text


def test_the_same_note_twice(made: Made) -> None:
    made.stay(10000001, 1, "HOME", text="Same note")
    made.stay(10000002, 1, "HOME", text="same  note")
    made.stay(10000003, 1, "HOME", text="told twice")
    made.stay(10000004, 1, "REHAB", text="told twice")
    made.stay(10000005, 1, "HOME", text="another")
    found = everything(made.load())
    assert len(found) == 2, "one copy of the first; none of the second, for nobody knows which label is right"


def test_what_is_not_right(made: Made) -> None:
    made.stay(10000001, 1, "HOME")
    made.stay(10000002, 1, "MOON")
    message = refusal(made.load)
    assert "admissions.csv.gz line 3: discharge_location 'MOON'; known: HOME, " in message
    made.admissions[1]["discharge_location"] = "REHAB"
    made.notes[1]["note_id"] = "10000002-RR-1"
    assert "mimic-iv-bhc.csv line 4: note_id '10000002-RR-1'; expected such as 10000032-DS-21" in refusal(made.load)
    made.notes[1]["note_id"] = "7"
    assert "note_id '7'" in refusal(made.load)
    made.notes.pop()
    assert "1 distinct value to split by" in refusal(made.load)
    assert "test_share" in refusal(lambda: made.load(test_share=0))
    made.discharge.clear()
    assert "none of its notes has a discharge location" in refusal(made.load)
    other = write(made.folder / "other.csv", ["hadm_id"], [{"hadm_id": 1}])
    assert "no column discharge_location, hospital_expire_flag; found hadm_id" in refusal(
        lambda: made.load(admissions=other)
    )
    assert "no such file" in refusal(lambda: made.load(discharge=str(made.folder / "absent.csv.gz")))
    assert "admissions is missing" in refusal(
        lambda: sources.make("mimic-disposition", {"notes": "a.csv", "discharge": "b.csv"})
    )
