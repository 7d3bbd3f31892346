"""The answer of a race in sentences, made from its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MOST_NAMES = 6
BY = {"head": "by its head", "prototype": "by the nearest prototype", "mix": "by its head and prototypes together"}


def percent(value: float | None) -> str:
    """A share in percent: `percent(0.8421)` is `84.2 %`."""
    return "–" if value is None else f"{100 * value:.1f} %"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign.

    >>> points(0.132), points(-0.02)
    ('+13.2', '−2.0')
    """
    return f"{100 * value:+.1f}".replace("-", "−").replace("+0.0", "0.0").replace("−0.0", "0.0")


def with_interval(gain: Mapping[str, Any] | None) -> str:
    """A difference and its interval, in points: `+13.2 (+9.1 to +17.3)`."""
    if gain is None:
        return "–"
    if gain["low"] is None:
        return points(gain["mean"])
    return f"{points(gain['mean'])} ({points(gain['low'])} to {points(gain['high'])})"


def size(count: float) -> str:
    """A number of bytes in a unit that suits it.

    >>> size(999), size(12_345), size(2_500_000)
    ('999 B', '12.3 kB', '2.5 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """A time in words of a clock.

    >>> duration(45), duration(600), duration(5400)
    ('45 s', '10 min', '1 h 30 min')
    """
    seconds = round(seconds)
    if seconds < 120:
        return f"{seconds} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Names in a sentence: `a, b and c`, or the first few of many.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def sentences(record: Mapping[str, Any]) -> list[str]:
    """The answer: which method, how sure, what it gains and costs, who gains or loses, and what a test says.

    Args:
        record: The content of `advice.json`.

    Returns:
        Whole sentences, the most important first.
    """
    told = [_advice(record), _gain(record)]
    told += [
        sentence
        for sentence in (_close(record), _control(record), _cost(record), _sites(record), _test(record))
        if sentence
    ]
    return [*told, *record["notes"]]


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["label"])


def _advice(record: Mapping[str, Any]) -> str:
    advised, local = record["advised"], record["local"]
    begin = ""
    if record["judged_after"] < record["rounds"]:
        begin = f"After {record['judged_after']} of {record['rounds']} rounds only, and so with caution: "
    elif record["interrupted"]:
        begin = "The race was stopped, so this is a partial answer: "
    if advised["label"] != local["label"]:
        sentence = f"go on with {_name(advised)}, predicting {BY[advised['by']]}."
    else:
        sure = {
            "unknown": "one seed of so few sites cannot say whether anything is better",
            "not different": "nothing that was raced is better by more than chance",
        }[record["certainty"]]
        sentence = f"go on with {_name(local)}, predicting {BY[local['by']]}: {sure}."
    whole = begin + sentence
    return whole[0].upper() + whole[1:]


def _gain(record: Mapping[str, Any]) -> str:
    contender, local, gain = record["contender"], record["local"], record["gain"]
    told = (
        f"{_name(contender)} is right on {percent(contender['accuracy'])} of the validation rows and {_name(local)} on "
        f"{percent(local['accuracy'])}: {points(gain['mean'])} points"
    )
    if gain["low"] is None:
        return f"{told}, of which there is no interval, because there are fewer than three seeds and three sites."
    told += f" (95 % interval {points(gain['low'])} to {points(gain['high'])}, over {gain['number']} {gain['over']})"
    if gain["over"] == "sites":
        told += "; with so few seeds, another start could still change it"
    methods = record["methods_compared"]
    compared = "the one method" if methods == 1 else f"the {methods} methods"
    return (
        told
        + {
            "sure": f". This is sure: it holds even when one allows for {compared} that were compared.",
            "fairly sure": f". This is fairly sure: the best of {methods} methods was picked, which flatters it.",
            "not different": ". That is no difference that could not be chance.",
        }[record["certainty"]]
    )


def _close(record: Mapping[str, Any]) -> str:
    close = record["close"]
    return f"Too close to {_name(record['contender'])} to tell apart: {listed(close)}." if close else ""


def _control(record: Mapping[str, Any]) -> str:
    control = record["control"]
    if control is None:
        return ""
    return (
        f"With the same loss and nothing exchanged, {_name(record['contender'])} is right on "
        f"{percent(control['accuracy'])}: of its gain, {points(control['by_loss']['mean'])} points are the loss and "
        f"{with_interval(control['by_exchange'])} the exchange."
    )


def _cost(record: Mapping[str, Any]) -> str:
    cost, rounds = record["cost"], record["rounds"]
    if not cost["up_per_round"] and not cost["down_per_round"]:
        return f"{_name(record['contender'])} sends nothing."
    return (
        f"A round of {_name(record['contender'])} costs {size(cost['up_per_round'])} up and {size(cost['down_per_round'])} "
        f"down, all {len(record['sites'])} sites together; {rounds} rounds cost {size(cost['up'])} and {size(cost['down'])}."
    )


def _sites(record: Mapping[str, Any]) -> str:
    gains = record["site_gains"]
    lose = [f"{s['name']} ({points(s['gain']['mean'])})" for s in gains if s["gain"]["mean"] < 0]
    win = sum(s["gain"]["mean"] > 0 for s in gains)
    same = len(gains) - win - len(lose)
    where = "As the first seed divides the data, with" if record["sites_are_assumed"] else "With"
    told = f"{where} {_name(record['contender'])} {win} of {len(gains)} sites gain{'s' if win == 1 else ''} over Local"
    told += f", {same} {'is' if same == 1 else 'are'} as with Local" if same else ""
    return f"{told} and {len(lose)} lose{'s' if len(lose) == 1 else ''}" + (f": {listed(lose)}." if lose else ".")


def _test(record: Mapping[str, Any]) -> str:
    test = record["test"]
    if test is None:
        return ""
    looked = "looked at once" if test["looks"] == 1 else f"looked at for {test['looks']} methods so far"
    return (
        f"On the test rows ({looked}), {_name(record['contender'])} is right on {percent(test['contender'])} and "
        f"{_name(record['local'])} on {percent(test['local'])}: {with_interval(test['gain'])} points."
    )


def table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of all entries.

    Args:
        record: The content of `advice.json`.

    Returns:
        The names of the columns, and the cells of each line.
    """
    head = [
        "entry",
        "by",
        "validation",
        "gain over Local",
        "up / round",
        "down / round",
        "seeds",
        "rounds",
        "in the end",
    ]
    lines = [
        [
            row["label"],
            row["by"] or "–",
            percent(row["accuracy"]),
            with_interval(row["gain"]),
            size(row["up_per_round"]) if row["rounds"] else "–",
            size(row["down_per_round"]) if row["rounds"] else "–",
            str(row["seeds"]),
            str(row["rounds"]),
            row["fate"],
        ]
        for row in record["table"]
    ]
    return head, lines


def site_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table of the sites: the contender and Local on validation rows, and on test rows where there was a test."""
    test = {row["name"]: row for row in (record["test"] or {}).get("sites", ())}
    head = ["site", "validation rows", "Local", record["contender"]["label"], "gain"]
    head += ["test: Local", f"test: {record['contender']['label']}"] if test else []
    lines = []
    for site in record["site_gains"]:
        line = [site["name"], str(site["samples"]), percent(site["local"]), percent(site["contender"])]
        line.append(with_interval(site["gain"]))
        if test:
            row = test.get(site["name"], {})
            line += [percent(row.get("local")), percent(row.get("contender"))]
        lines.append(line)
    return head, lines
