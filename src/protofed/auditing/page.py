"""The audit as one self-contained page: sentences first, then numbers with intervals, then pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from importlib import resources
from string import Template

import numpy as np
from torch import Tensor

from .. import markup
from ..version import __version__
from . import words
from .conduct import ClientFindings, Findings, RunAudit
from .inversion import Inversion
from .membership import SCORES, strongest

WARNING = (
    '<section class="warning"><p><strong>This page shows true samples of the audited clients.</strong> Keep it where these '
    "samples may be kept. The file audit.json beside it has the numbers without samples.</p></section>"
)
MOST_FEATURES = 8  # rows of the table that stands for a picture where samples are no images


def render(runs: Sequence[RunAudit]) -> str:
    """The page of one or several audited runs.

    Args:
        runs: The audits.

    Returns:
        The page in HTML. It fetches nothing.
    """
    files = resources.files("protofed")
    names = ", ".join(run.run for run in runs)
    body = [WARNING] if any(run.shows_samples for run in runs) else []
    body += [_side_by_side(runs)] if len(runs) > 1 else []
    for run in runs:
        body += [_summary(run), _numbers(run), *(_client(run, client) for client in run.sent.clients)]
    return Template(files.joinpath("auditing/audit.html").read_text(encoding="utf-8")).substitute(
        title=markup.text(f"What the messages of {names} give away"),
        style=files.joinpath("report/static/page.css").read_text(encoding="utf-8"),
        body="\n".join(body),
        version=markup.text(__version__),
    )


# --- runs -------------------------------------------------------------------------------------------------------------
def _side_by_side(runs: Sequence[RunAudit]) -> str:
    """A table of the main numbers of several runs, with the settings in which they differ."""
    keys = [
        k for k in dict.fromkeys(k for run in runs for k in run.settings) if len({r.settings.get(k) for r in runs}) > 1
    ]
    head = ["run", *keys, "right member", "without the message", "nearer to own", "error of counts"]
    rows = []
    for run in runs:
        found, numbers = run.sent, run.numbers()
        best, alone = found.best, found.alone
        error = numbers["count_error"]
        rows.append(
            [
                run.run,
                *(run.settings.get(key, "–") for key in keys),
                words.with_interval(best.auc if best else None),
                words.with_interval(alone.auc if alone else None),
                words.with_interval(found.own_nearer),
                "–" if error is None else f"{error:.1f}",
            ]
        )
    caption = "How often the attacker is right, and how often an inversion is nearer to own samples; 50 % is a guess."
    return markup.section("Runs side by side", markup.table(caption, head, rows))


def _summary(run: RunAudit) -> str:
    clients = words.listed([client.name for client in run.sent.clients])
    about = (
        f"{run.method} on {run.data}, after round {run.round} of {run.rounds}. Asked was what the next message of {clients} "
        "would give away."
    )
    told = "".join(
        f"<h3>{markup.text(head)}</h3>{markup.paragraphs(lines)}" for head, lines in words.summary(run).items()
    )
    return markup.section(run.run, f'<p class="kind">{markup.text(about)}</p>\n<div class="told">{told}</div>')


def _numbers(run: RunAudit) -> str:
    """The numbers of all clients together, as sent and, where something protects the messages, without that."""
    versions = {"as sent": run.sent} | ({"without protection": run.unprotected} if run.unprotected else {})
    columns = [f"right, {name}" for name in versions] + [f"found, {name}" for name in versions]
    head = ["An attacker goes by the", *columns]
    scores = [name for name in SCORES if any(name in found.membership for found in versions.values())]
    rows = []
    for name in scores:
        measures = [found.membership.get(name) for found in versions.values()]
        label = SCORES[name] + ("" if any(m.from_message for m in measures if m) else " (no message needed)")
        right = [words.with_interval(m.auc if m else None) for m in measures]
        rows.append([label, *right, *(words.percent(m.true_positives if m else None) for m in measures)])
    caption = (
        "Right: how often a member is told from a non-member, with its 95 % interval; 50 % is a guess. Found: the share of "
        "members found where 1 % of non-members may be falsely accused."
    )
    content = markup.table(caption, head, rows) if rows else ""
    return markup.section("All audited clients together", content + _inversion_table(versions) + _bytes_table(versions))


def _inversion_table(versions: dict[str, Findings]) -> str:
    rows = []
    for name, found in versions.items():
        inverted = [i for client in found.clients for i in client.inversions]
        if inverted:
            others = [i.others for i in inverted if i.others is not None]
            similarity = [f"{np.mean(v):.2f}" if v else "–" for v in ([i.own for i in inverted], others)]
            rows.append([name, str(len(inverted)), words.with_interval(found.own_nearer), *similarity])
    head = ["Inversion", "prototypes", "nearer to own", "similarity to own", "to others"]
    caption = "Similarity is the correlation with the nearest of the client's samples, and of as many of other people."
    return markup.table(caption, head, rows) if rows else ""


def _bytes_table(versions: dict[str, Findings]) -> str:
    kinds = list(dict.fromkeys(k for found in versions.values() for c in found.clients for k in c.disclosure.bytes))
    rows = [
        [name, *(f"{np.mean([c.disclosure.bytes.get(k, 0) for c in found.clients]):,.0f}" for k in kinds)]
        for name, found in versions.items()
    ]
    return markup.table("Bytes of a message by what they hold, mean over the clients", ["Bytes", *kinds], rows)


# --- clients ----------------------------------------------------------------------------------------------------------
def _client(run: RunAudit, client: ClientFindings) -> str:
    unprotected = {} if run.unprotected is None else {c.client: c for c in run.unprotected.clients}
    before = unprotected.get(client.client)
    content = markup.paragraphs(words.disclosed(client, run.class_names))
    content += f'<p class="small">The message holds: {markup.text("; ".join(client.disclosure.parts))}.</p>'
    best = strongest(client.membership)
    if best is not None:
        estimate = client.membership[best].auc
        told = (
            f"Of this client alone, a member is told from a non-member in {words.with_interval(estimate)} of the cases"
        )
        content += markup.paragraphs([f"{told}, by the {SCORES[best]} ({estimate.samples // 2} members)."])
    plain = {i.label: i for i in before.inversions} if before else {}
    content += "".join(_inverted(run, inversion, plain.get(inversion.label)) for inversion in client.inversions)
    return markup.section(f"{run.run}: {client.name}", content, "client")


def _inverted(run: RunAudit, inversion: Inversion, plain: Inversion | None) -> str:
    """One prototype's inversion: pictures or a table, and the numbers below."""
    name = run.class_names[inversion.label]
    samples = f"{inversion.samples} sample{'' if inversion.samples == 1 else 's'}"
    caption = f"{name}, prototype of {samples}. Similarity to the nearest own sample {inversion.own:.2f}"
    if inversion.others is not None and inversion.own_nearer is not None:
        caption += f", to the nearest of as many others {inversion.others:.2f}"
        caption += f"; nearer to own in {words.percent(inversion.own_nearer)} of the comparisons"
    shown = inversion.shown
    parts = {"computed from the message": shown.inverted}
    if plain is not None:
        parts["computed without protection"] = plain.shown.inverted
    parts |= {"mean of its samples": shown.class_mean, "its nearest true sample": shown.nearest_own}
    if shown.nearest_other is not None:
        parts["nearest of other people"] = shown.nearest_other
    body = _pictures(parts) if is_image(run.sample_shape, run.kind) else _features(parts)
    return f"<figure>{body}<figcaption>{markup.text(caption)}.</figcaption></figure>"


def is_image(shape: Sequence[int], kind: str) -> bool:
    """Whether samples can be shown as pictures: one or three channels of at least four by four pixels."""
    return kind in ("auto", "image") and len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= 4


def _pictures(parts: dict[str, Tensor]) -> str:
    cells = "".join(
        f'<li><img src="{picture(sample)}" alt="{markup.text(name)}"><span>{markup.text(name)}</span></li>'
        for name, sample in parts.items()
    )
    return f'<ul class="pictures">{cells}</ul>'


def picture(sample: Tensor) -> str:
    """A sample `[channels, height, width]` as the address of a PNG within the page, in its full contrast."""
    from PIL import Image

    low, high = sample.amin(), sample.amax()
    grey = ((sample - low) / (high - low).clamp_min(1e-9) * 255).round().byte().cpu().numpy()
    image = Image.fromarray(grey[0] if len(grey) == 1 else np.ascontiguousarray(grey.transpose(1, 2, 0)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _features(parts: dict[str, Tensor]) -> str:
    """The features in which what was computed is farthest from 0, beside the true samples."""
    first = next(iter(parts.values())).flatten()
    rows = [
        [f"feature {k}", *(f"{float(sample.flatten()[k]):.2f}" for sample in parts.values())]
        for k in first.abs().argsort(descending=True)[:MOST_FEATURES].tolist()
    ]
    return markup.table("The strongest features, in the units that the model is given", ["", *parts], rows)
