"""How clients are trained where the settings leave it open: a rule of the model's and the data's sizes alone.

Engines differ in the last bits, so nothing that varies from run to run may decide between them, no timing and no number of
cores. The bounds are read off `docs/results/bench/choice.json`, which `benchmarks/choice.py` measures; `docs/engines.md`
has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

STACK_PARAMETERS = 300_000  # a stack reads all clients' weights at every step; larger ones do not stay in the cache
STACK_FLOPS = 50_000_000  # of a step's forward pass: beyond it the calls that a stack saves do not count
STACK_FLOPS_CONVOLVED = 10_000_000  # the same under convolutions, which are slower in a stack
ACCELERATOR_PARAMETERS = 1_000_000  # not measured: an accelerator stacks what keeps it waiting for calls
CHANNELS = 4  # input channels of a convolution from which it is faster with its channels last
GROUP_CLIENTS, GROUP_LEAST, GROUP_PARAMETERS = 64, 8, 4_000_000  # clients in a stack: at most, at least, by parameters
GROUP_ON_ACCELERATOR = 256


@dataclass(frozen=True)
class Way:
    """How one process trains the clients of one architecture; `auto` where it is open."""

    how: str
    layout: str
    convolution: str

    @property
    def label(self) -> str:
        """The way in a few words, without what is usual."""
        usual = ("contiguous", "grouped", "auto")
        return " ".join([self.how, *(word for word in (self.layout, self.convolution) if word not in usual)])


@dataclass(frozen=True)
class Facts:
    """What the rule knows of one architecture and its clients."""

    parameters: int
    """Parameters that are trained."""
    flops: int
    """Floating-point operations of the forward pass of one client's step."""
    channels: int
    """The most input channels of a convolution; 0 where there is none."""
    clients: int
    """Clients of this architecture that train in a round."""
    accelerator: bool = False

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters, {self.flops:,} operations a step, {self.clients} clients a round"


OPEN = Way("auto", "auto", "auto")


def rule(facts: Facts, given: Way = OPEN) -> Way:
    """The way to train clients of one architecture.

    Args:
        facts: The sizes of the model, of a step and of a round.
        given: What is asked for by name, which stays as it is.

    Returns:
        A loop or a stack with its memory layout and its convolutions, nothing left open.

    Example:
        `rule(Facts(parameters=17_226, flops=280_000, channels=0, clients=20)).how` is `"stack"`.
    """
    how = given.how
    if how == "auto":
        how = "stack" if facts.clients > 1 and _small(facts) else "loop"
    if how == "stack":
        asked = "grouped" if given.convolution in ("auto", "lean") else given.convolution  # lean: of a loop beside it
        return Way(how, "contiguous", asked)
    last = facts.channels >= CHANNELS and not facts.accelerator
    layout, convolution = ("channels_last", "lean") if last else ("contiguous", "grouped")
    if given.layout != "auto":  # a lean convolution wants its channels last
        layout, convolution = given.layout, "grouped"
    return Way(how, layout, convolution if given.convolution == "auto" else given.convolution)


def _small(facts: Facts) -> bool:
    """Whether the calls that a stack saves take longer than its detours through memory."""
    if facts.accelerator:
        return facts.parameters <= ACCELERATOR_PARAMETERS
    most = STACK_FLOPS_CONVOLVED if facts.channels else STACK_FLOPS
    return facts.parameters <= STACK_PARAMETERS and facts.flops <= most


def largest_group(parameters: int, accelerator: bool) -> int:
    """How many clients are stacked at most. More of them share the calls of a step; fewer leave groups for every worker."""
    if accelerator:
        return GROUP_ON_ACCELERATOR
    return min(GROUP_CLIENTS, max(GROUP_LEAST, GROUP_PARAMETERS // max(1, parameters)))
