"""MIMIC-IV: where patients go after hospital, predicted from their discharge notes.

Three official files are joined: the notes of MIMIC-IV-Ext-BHC, the discharge table of MIMIC-IV-Note (which note belongs
to which stay) and the admissions table of MIMIC-IV (where that stay ended). All need credentialed access to PhysioNet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ProtofedError
from .lines import table
from .sources import listed, register
from .text import Note, TextSource, distinct, split_off
from .types import Dataset

log = logging.getLogger("protofed")

CLASSES = ("Home", "Home Health", "SNF", "Rehab", "Expired", "Other")
DISPOSITION = {
    "HOME": "Home",
    "HOME HEALTH CARE": "Home Health",
    "SKILLED NURSING FACILITY": "SNF",
    "REHAB": "Rehab",
    "DIED": "Expired",
    "ACUTE HOSPITAL": "Other",
    "AGAINST ADVICE": "Other",
    "ASSISTED LIVING": "Other",
    "CHRONIC/LONG TERM ACUTE CARE": "Other",
    "HEALTHCARE FACILITY": "Other",
    "HOSPICE": "Other",
    "OTHER FACILITY": "Other",
    "PSYCH FACILITY": "Other",
}


@register("mimic-disposition")
@dataclass(frozen=True, kw_only=True)
class MimicDisposition(TextSource):
    """Discharge disposition in six classes. The test part is 30 % of the notes, of other patients than the rest."""

    notes: str
    """`mimic-iv-bhc.csv` of MIMIC-IV-Ext-BHC."""
    discharge: str
    """`note/discharge.csv.gz` of MIMIC-IV-Note."""
    admissions: str
    """`hosp/admissions.csv.gz` of MIMIC-IV."""
    test_share: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be between 0 and 1, got {self.test_share}")

    def read(self) -> Dataset:
        notes = distinct(list(self.labelled()), "drop", False, self.notes)
        if not notes:
            raise ProtofedError(f"{self.notes}: none of its notes has a discharge location in {self.admissions}")
        return self.dataset(notes, split_off(notes, self.test_share, f"{self.notes} patients"), CLASSES, False)

    def labelled(self) -> Iterator[Note]:
        """The notes with their labels; those without a label or text are left out, with a warning."""
        skip = self.damaged == "skip"
        dispositions = self.dispositions(skip)
        stays = {row["note_id"]: row["hadm_id"] for _, row in table(self.discharge, ("note_id", "hadm_id"), skip)}
        dropped = {"are not in the discharge table": 0, "have no discharge location": 0, "are empty": 0}
        for source, row in table(self.notes, ("note_id", "input"), skip):
            patient, note_type, number = (*row["note_id"].split("-"), "", "")[:3]
            if not (patient.isdecimal() and note_type == "DS" and number):
                raise ProtofedError(f"{source}: note_id {row['note_id']!r}; expected such as 10000032-DS-21")
            stay = stays.get(row["note_id"])
            if stay is None:
                dropped["are not in the discharge table"] += 1
            elif stay not in dispositions:
                dropped["have no discharge location"] += 1
            elif not row["input"].strip():
                dropped["are empty"] += 1
            else:
                yield Note(row["input"], dispositions[stay], source, unit=patient)
        for reason, count in dropped.items():
            if count:
                log.warning("%s: %d notes %s and are left out", self.notes, count, reason)

    def dispositions(self, skip: bool) -> dict[str, str]:
        """The class of each stay that has one. Patients who died in hospital are `Expired`, whatever the location says."""
        dispositions = {}
        for source, row in table(self.admissions, ("hadm_id", "discharge_location", "hospital_expire_flag"), skip):
            location = row["discharge_location"].strip()
            if row["hospital_expire_flag"].strip() == "1":
                dispositions[row["hadm_id"]] = "Expired"
            elif location in DISPOSITION:
                dispositions[row["hadm_id"]] = DISPOSITION[location]
            elif location:
                raise ProtofedError(f"{source}: discharge_location {location!r}; known: {listed(DISPOSITION)}")
        return dispositions
