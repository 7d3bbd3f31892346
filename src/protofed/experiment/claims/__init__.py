"""The papers' claims, each with our test of it, and the page that says from files of results which of them hold.

`claim.py` reads the claims, one file for each paper beside this one; `evidence.py` reads the rows that a test compares and
takes their difference; `verdict.py` has the rule from differences to a verdict; `page.py` writes the page.
"""

from .claim import CLAIMS, PAPERS, Claim, Comparison, load_claims, read_claims
from .evidence import Evidence
from .page import claims_page, write_claims
from .verdict import SEEDS, Finding, verdict_of

__all__ = [
    "CLAIMS",
    "PAPERS",
    "SEEDS",
    "Claim",
    "Comparison",
    "Evidence",
    "Finding",
    "claims_page",
    "load_claims",
    "read_claims",
    "verdict_of",
    "write_claims",
]
