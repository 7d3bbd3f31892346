"""The page of claims: every claim of the papers in a table, with our test, its effect and the verdict, from files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ...disk import write_atomically
from ...errors import ProtofedError
from ...results.gains import gain_text
from ..reproduce.table import markdown_table
from .claim import CLAIMS, PAPERS, Claim, load_claims
from .evidence import Evidence
from .verdict import Finding, Verdict, deciding, verdict_of

VERDICTS: tuple[Verdict, ...] = (
    "holds",
    "holds in part",
    "only against a weaker baseline",
    "does not hold here",
    "not measured yet",
    "cannot be tested here",
)
HEAD = CLAIMS / "head.md"  # what the page says before its tables


def claims_page(results: Path) -> str:
    """Write the page in Markdown.

    Args:
        results: The folder of results.

    Returns:
        The text: the rule, how many claims have which verdict, and a table for each paper.
    """
    evidence = Evidence(results)
    judged = {
        paper: [(claim, found, verdict_of(found, claim.cannot)) for claim, found in _found(paper, evidence)]
        for paper in PAPERS
    }
    overview = [
        [PAPERS[paper], *(str(sum(v == verdict for _, _, v in lines)) for verdict in VERDICTS), str(len(lines))]
        for paper, lines in judged.items()
    ]
    sums = [str(sum(int(line[k]) for line in overview)) for k in range(1, len(VERDICTS) + 2)]
    table = markdown_table(["", *VERDICTS, "claims"], [*overview, ["all", *sums]], align="---:")
    parts = [f"{HEAD.read_text(encoding='utf-8')}\n{table}\n{_against(judged)}"]
    for paper, lines in judged.items():
        cells = [
            [f"[{claim.id}](#{claim.id.lower()})", claim.claim, claim.where, f"**{verdict}**{_count(found)}"]
            for claim, found, verdict in lines
        ]
        text = markdown_table(["", "claim", "where", "verdict"], cells)
        entries = "\n".join(_entry(claim, found, verdict) for claim, found, verdict in lines)
        folders: dict[Path, str] = {}
        for claim, _, _ in lines:
            for folder, command in evidence.folders(claim).items():
                folders[folder] = folders.get(folder) or command
        settings = "".join(f"- {evidence.setting(folder)}{_made(command)}\n" for folder, command in folders.items())
        runs = f"\n### Runs of {PAPERS[paper]}\n\n{settings}" if folders else ""
        parts.append(f"## {PAPERS[paper]}\n\n{text}\n\n{entries}{runs}")
    return "\n".join(parts)


def write_claims(results: Path, out: Path) -> None:
    """Write the page to a file."""
    if not results.is_dir():
        raise ProtofedError(f"{results}: no such folder of results")
    try:
        write_atomically(out, claims_page(results).encode())
    except OSError as error:
        raise ProtofedError(f"--out {out}: cannot be written ({error.strerror})") from None


def _found(paper: str, evidence: Evidence) -> list[tuple[Claim, list[Finding]]]:
    return [(claim, evidence.findings(claim)) for claim in load_claims(paper)]


def _against(judged: Mapping[str, Sequence[tuple[Claim, Sequence[Finding], Verdict]]]) -> str:
    """What the claims that do not hold here divide into: those of which a comparison shows the opposite, and the others."""
    lost = [found for lines in judged.values() for _, found, verdict in lines if verdict == "does not hold here"]
    if not lost:
        return ""
    opposed = sum(any(f.opposes for f in deciding(found)) for found in lost)
    return (
        f"\nOf the {len(lost)} that do not hold here, {opposed} have a comparison that shows the opposite; of the other "
        f"{len(lost) - opposed} these runs show neither the claim nor its opposite.\n"
    )


def _count(findings: Sequence[Finding]) -> str:
    """How many of the comparisons with the paper's rows show the claim, and how many the opposite."""
    found = deciding(findings)
    if not found:
        return ""
    shown, against = sum(f.shows for f in found), sum(f.opposes for f in found)
    return f"<br>{shown} of {len(found)} show it" + (f", {against} the opposite" if against else "")


def _entry(claim: Claim, findings: Sequence[Finding], verdict: Verdict) -> str:
    """What the verdict on a claim rests on: its comparisons in a table, what is not measured, and the note."""
    parts = [f"### {claim.id}", f"{claim.claim} ({claim.where}) **{verdict.capitalize()}**."]
    lines: dict[str, list[str]] = {}
    for finding in findings:
        if finding.measured:
            lines.setdefault(f"{finding.heading} (`{finding.source}`)", []).append(_effect(finding))
    if lines:
        cells = [[heading, "<br>".join(effects)] for heading, effects in lines.items()]
        parts.append(markdown_table(["compared", "difference"], cells))
    missing: dict[str, list[str]] = {}
    for finding in findings:
        if not finding.measured:
            missing.setdefault(finding.heading, []).append(f"{finding.better} − {finding.worse}{_few(finding)}")
    if missing:
        what = "; ".join(f"{heading}: {', '.join(pairs)}" for heading, pairs in missing.items())
        commands = ", ".join(dict.fromkeys(f"`{f.command}`" for f in findings if f.command and not f.measured))
        parts.append(f"Not measured{f' ({commands})' if commands else ''}: {what}.")
    parts += [f"*{text}*" for text in (claim.cannot, claim.note) if text]
    return "\n\n".join(parts) + "\n"


def _made(command: str) -> str:
    return f" ({command})" if command else ""


def _few(finding: Finding) -> str:
    return f" ({finding.seeds} seed{'s' if finding.seeds > 1 else ''} only)" if finding.seeds else ""


def _effect(finding: Finding) -> str:
    assert finding.gain is not None
    mark = " ‡" if finding.stronger else ""
    bound = f" (asked: within {finding.within:g})" if finding.within is not None else ""
    bound = bound or (f" (asked: above {finding.least:g})".replace("-", "−") if finding.least else "")
    half = None if finding.counted else finding.gain.half
    effect = gain_text(finding.gain.mean, half, finding.gain.column.digits)
    sign = "✓" if finding.shows else "✗" if finding.opposes else "○"
    return f"{sign} {finding.better} − {finding.worse}{mark} {effect}{bound}"
