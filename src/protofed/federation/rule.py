"""How clients are trained where the settings leave it open: a rule of the model's and the data's sizes alone.

Engines differ in the last bits, so nothing that varies from run to run may decide between them, no timing and no number
of cores. The bounds are read off `docs/results/bench/choice.json`, which `benchmarks/choice.py` measures;
`docs/engines.md` has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

STACK_PARAMETERS = (
    300_000  # a stack reads all clients' weights at every step, and larger models do not fit into the cache
)
STACK_FLOPS = 50_000_000  # of a step's forward pass; above it, the saved calls are a small part of the time
STACK_FLOPS_CONVOLVED = 10_000_000  # the same under convolutions, which are slower in a stack
ACCELERATOR_PARAMETERS = 1_000_000  # not measured: small models leave an accelerator waiting for calls
CHANNELS = 4  # input channels of a convolution from which it is faster with its channels last
GROUP_CLIENTS, GROUP_LEAST, GROUP_PARAMETERS = 64, 8, 4_000_000  # clients in a stack: at most, at least, by parameters
GROUP_ON_ACCELERATOR = 256


@dataclass(frozen=True)
class Recipe:
    """How one process trains the clients of one architecture: by which engine, memory format and convolution.

    A field is `auto` where the settings leave it open.
    """

    engine: str
    layout: str
    convolution: str

    @property
    def label(self) -> str:
        """The recipe in a few words; the usual memory format and convolution are not mentioned."""
        usual = ("contiguous", "grouped", "auto")
        return " ".join([self.engine, *(word for word in (self.layout, self.convolution) if word not in usual)])


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
    few_outputs: bool = False
    """Whether a convolution has so few output positions that its lean form differs from torch's own."""

    def __str__(self) -> str:
        return f"{self.parameters:,} parameters, {self.flops:,} operations a step, {self.clients} clients a round"


OPEN = Recipe("auto", "auto", "auto")


def rule(facts: Facts, request: Recipe = OPEN) -> Recipe:
    """Decide how the clients of one architecture are trained.

    Args:
        facts: The sizes of the model, of a step and of a round.
        request: What the settings ask for by name; it is left as it is.

    Returns:
        A recipe in which nothing is `auto`: a loop or a stack, with its memory format and its convolutions.

    Example:
        `rule(Facts(parameters=17_226, flops=280_000, channels=0, clients=20)).engine` is `"stack"`.
    """
    engine = request.engine
    if engine == "auto":
        engine = "stack" if facts.clients > 1 and _small(facts) else "loop"
    if engine == "stack":
        convolution_name = (
            "grouped" if request.convolution in ("auto", "lean") else request.convolution
        )  # lean may be meant for a loop of another architecture
        return Recipe(engine, "contiguous", convolution_name)
    channels_last = facts.channels >= CHANNELS and not facts.accelerator
    layout = "channels_last" if channels_last else "contiguous"
    convolution = "lean" if channels_last and facts.few_outputs else "grouped"
    if request.layout != "auto":  # the lean convolution is faster only with its channels last
        layout, convolution = request.layout, "grouped"
    return Recipe(engine, layout, convolution if request.convolution == "auto" else request.convolution)


def _small(facts: Facts) -> bool:
    """Whether the calls that a stack saves take longer than its additional memory traffic."""
    if facts.accelerator:
        return facts.parameters <= ACCELERATOR_PARAMETERS
    most = STACK_FLOPS_CONVOLVED if facts.channels else STACK_FLOPS
    return facts.parameters <= STACK_PARAMETERS and facts.flops <= most


def largest_group(parameters: int, accelerator: bool) -> int:
    """The largest number of clients in one stack.

    A larger stack shares the calls of a step among more clients; smaller ones leave a group for every worker process.
    """
    if accelerator:
        return GROUP_ON_ACCELERATOR
    return min(GROUP_CLIENTS, max(GROUP_LEAST, GROUP_PARAMETERS // max(1, parameters)))
