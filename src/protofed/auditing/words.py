"""The findings of an audit in whole sentences, for people who do not train networks."""

from __future__ import annotations

from collections.abc import Sequence

from .conduct import ClientFindings, Findings, RunAudit
from .disclosure import Disclosure
from .statistics import ENOUGH, Estimate


def percent(value: float | None) -> str:
    """A share in percent: `87 %`; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.0f}\N{NO-BREAK SPACE}%"


def with_interval(estimate: Estimate | None) -> str:
    """An estimate in percent with its interval: `87 % (82 to 91)`."""
    if estimate is None:
        return "–"
    return f"{percent(estimate.value)} ({100 * estimate.low:.0f} to {100 * estimate.high:.0f})"


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names as a list in a sentence: `a, b and c`."""
    names = [*names[:most], f"{len(names) - most} more"] if len(names) > most + 1 else list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"


def who_can(run: RunAudit) -> str:
    """A sentence on who has what the attacks below need."""
    if run.weights_sent:
        return (
            "In this method the model's weights travel too, so the server has the model and can try all of this "
            "without any further help."
        )
    if run.model_stays:
        return (
            "In this method models stay with the clients. The attacks below need the client's model, which the server "
            "does not have; they are the worst case, in which somebody has obtained it."
        )
    return "The attacks below need the client's model; they are the worst case, in which somebody has obtained it."


def disclosed(client: ClientFindings, names: Sequence[str]) -> list[str]:
    """What one client's message says by itself, in sentences."""
    d = client.disclosure
    sentences = []
    if d.samples_sent is not None:
        exact = d.samples_sent == d.samples
        sentences.append(
            f"It trains on {d.samples} samples, and the message says so."
            if exact
            else f"It trains on {d.samples} samples; the message says {d.samples_sent:g}."
        )
    if d.classes_sent is None:
        return [*sentences, "No prototypes are sent, so the message does not name the classes that it holds."]
    return [*sentences, _classes_told(d, names), _counts_told(d)]


def _classes_told(d: Disclosure, names: Sequence[str]) -> str:
    held, sent = set(d.classes_held), set(d.classes_sent or ())
    words = listed([names[k] for k in d.classes_held])
    if sent == held:
        return f"The message names exactly the classes that it holds: {words}."
    if sent > held and len(sent) == len(names):
        guess = (
            "" if d.class_auc is None else f" The counts tell the true ones from the others in {percent(d.class_auc)}."
        )
        return (
            f"The message has a row for every class, so the rows do not tell which it holds (it holds {words}).{guess}"
        )
    missing, added = listed([names[k] for k in sorted(held - sent)]), listed([names[k] for k in sorted(sent - held)])
    return (
        f"It holds {words}. The message leaves out {missing}, and names {added} though it does not hold "
        f"{'it' if len(sent - held) == 1 else 'them'}."
        if sent - held
        else f"It holds {words}. The message names these, but leaves out {missing}."
    )


def _counts_told(d: Disclosure) -> str:
    if not d.count_error:
        return "It says how many samples of each class it holds, exactly."
    return f"It says how many samples of each class it holds, with an error of {d.count_error:.1f} samples on average."


def members_told(found: Findings) -> list[str]:
    """What the membership test found, in sentences."""
    best = found.strongest
    if best is None:
        return [
            "Whether somebody's sample was trained on was not measured: no class has both training and test samples, "
            "or the message holds neither prototypes nor weights."
        ]
    measure, alone = found.membership[best], found.alone
    sentences = [
        "An attacker is shown two samples of one kind, one that the client trained on and one that it did not. With the "
        f"message and the client's model, the attacker names the right one in {with_interval(measure.auc)} of the cases; "
        f"50 % is a mere guess ({measure.auc.samples // 2} members and as many others).",
        (
            "So whoever has both can tell of some people that their samples were used."
            if measure.auc.beyond_guessing
            else "The interval reaches down to a guess, so the test does not show that whose samples were used can be told."
        ),
    ]
    if alone is not None:
        overlap = (
            "; the intervals overlap, so the message may add nothing to it" if alone.auc.high >= measure.auc.low else ""
        )
        sentences.append(f"With the model but without the message it would be {with_interval(alone.auc)}{overlap}.")
    if measure.true_positives is None:
        sentences.append(
            f"How many members can be named with near certainty was not measured: it takes {ENOUGH} others."
        )
    else:
        sentences.append(
            f"If at most one in a hundred non-members may be named falsely, {percent(measure.true_positives)} of the "
            "members are found; a guess finds 1 %."
        )
    return sentences


def inverted_told(found: Findings) -> list[str]:
    """What the inversion found, in sentences."""
    inverted = [i for client in found.clients for i in client.inversions]
    if not inverted:
        return [
            "No inversion was tried: the message holds no prototypes, or the samples are text, or nobody else has samples "
            "to compare with."
        ]
    sentences = [
        f"From each of {len(inverted)} prototypes an input was computed whose embedding matches it. The attacker knows what "
        "such samples look like in general, from other people's samples."
    ]
    if found.own_nearer is None:
        return [
            *sentences,
            "Nobody else has samples of these classes, so it was not measured whether they show individuals.",
        ]
    sentences += [
        "The result is nearer to one of the client's own samples than to the nearest of as many samples of other people in "
        f"{with_interval(found.own_nearer)} of the comparisons; 50 % says that it shows what the class looks like, and "
        "nobody in particular.",
        (
            "So the prototypes show something of individual samples."
            if found.own_nearer.beyond_guessing
            else "The interval reaches down to a guess, so the test does not show that the prototypes show individuals."
        ),
    ]
    return sentences


def summary(run: RunAudit) -> dict[str, list[str]]:
    """The findings of a run in sentences under three headings, for the top of the page and for the terminal."""
    told = [c.disclosure for c in run.sent.clients]
    if all(d.classes_sent is None for d in told):
        learns = "its model and how many samples it trains on; no class is named"
    elif all(not d.count_error and d.classes_sent == d.classes_held for d in told):
        learns = "which classes it holds, and exactly how many samples of each"
    else:
        learns = "something of the classes it holds and of its samples of each, but not exactly; see each client below"
    protection = (
        f"What leaves a client is changed by {run.protection}."
        if run.protection
        else "Nothing protects the messages of this run: they leave the client as the method returns them."
    )
    return {
        "What the message says": [f"A server that sees a client's message learns {learns}.", protection, who_can(run)],
        "Whose samples were used": members_told(run.sent),
        "What the samples look like": inverted_told(run.sent),
    }
