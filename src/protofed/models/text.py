"""Text encoders: a transformer of the BERT family over token ids, as `data.text` makes them.

Layers that do not train are not parameters of the model. They are loaded once a process and shared by all its models,
so a client's weights, its messages and its checkpoints hold only what it trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ProtofedError
from ..pretrained import locate, quiet, transformers
from .base import Classifier, at_least, register

_LAYERS = {  # the attribute with the layers of each family; a layer is called with hidden states and an additive mask
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "xlm-roberta": "encoder.layer",
    "camembert": "encoder.layer",
    "distilbert": "transformer.layer",
}


@lru_cache(maxsize=4)
def _loaded(path: str) -> Any:
    """The published encoder on the CPU, which is never changed: models copy the layers that they train.

    `tiny` always has the same random weights, as if they were published, so that frozen layers agree between processes.
    """
    library = transformers(f"model 'bert' with path={path!r}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), quiet(library):
        torch.manual_seed(0)
        if path == "tiny":
            config = library.BertConfig(
                vocab_size=8192,
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=128,
                attn_implementation="sdpa",
            )
            network = library.BertModel(config, add_pooling_layer=False)
        else:
            location, local = locate(path, "model 'bert'")
            try:
                network = library.AutoModel.from_pretrained(
                    location, local_files_only=local, dtype=torch.float32, attn_implementation="sdpa"
                )
            except Exception as error:  # the library has many errors: no network, no such name, damaged weights
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise ProtofedError(
                    f"model 'bert': path={path!r} could not be loaded ({type(error).__name__}: {reason}); expected "
                    "tiny, minilm, a folder with config.json and model.safetensors, or a name of the hub"
                ) from None
    if network.config.model_type not in _LAYERS:
        raise ProtofedError(
            f"model 'bert': path={path!r} is a {network.config.model_type!r}; expected one of {', '.join(_LAYERS)}"
        )
    return network.requires_grad_(False).eval()


class TextEncoder(nn.Module):
    """An encoder from token ids `[n, length]`, padded with −1, to embeddings `[n, dim]`.

    The blocks are the embeddings of tokens and then the layers: those in `frozen`, and after them those in `layers`.
    """

    def __init__(self, network: Any, frozen: int, pooling: str, dim: int, dropout: float) -> None:
        super().__init__()
        blocks = [network.embeddings, *network.get_submodule(_LAYERS[network.config.model_type])]
        self.frozen = tuple(
            blocks[:frozen]
        )  # in a tuple, so that they are no parameters of this module and always in eval mode
        self.layers = nn.ModuleList(copy.deepcopy(blocks[frozen:])).requires_grad_(True).train()
        for module in self.layers.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        width = network.config.hidden_size
        self.project = nn.Identity() if dim == width else nn.Linear(width, dim)
        self.pooling = pooling
        self.vocabulary: int = network.config.vocab_size

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TextEncoder:
        """Move the model with its frozen part, of which a copy is moved, because the original is shared."""
        self.frozen = tuple(copy.deepcopy(block)._apply(fn) for block in self.frozen)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        if x.is_floating_point():
            raise ProtofedError(f"model 'bert' takes token ids, which are integers; got {x.dtype}. Try model=mlp")
        # under vmap or grad, and where the network is exported, values cannot be read
        in_transform = torch._C._functorch.maybe_current_level() is not None or torch.compiler.is_exporting()
        x = x if in_transform else self.trimmed(x)
        is_token = x >= 0
        h = x.clamp(min=0)  # no token attends to padding, so its value does not matter
        with sdpa_kernel(SDPBackend.MATH) if in_transform else nullcontext():  # vmap has no rule for the faster kernels
            for number, block in enumerate((*self.frozen, *self.layers)):
                with torch.set_grad_enabled(torch.is_grad_enabled() and number >= len(self.frozen)):
                    h = block(h, is_token[:, None, None]) if number else block(input_ids=h)
        if self.pooling == "cls":
            return self.project(h[:, 0])
        weight = is_token.to(h.dtype)[:, :, None]
        return self.project((h * weight).sum(1) / weight.sum(1).clamp(min=1))

    def trimmed(self, x: Tensor) -> Tensor:
        """The tokens without columns in which all samples have padding."""
        if int(x.max()) >= self.vocabulary:
            raise ProtofedError(
                f"model 'bert' knows {self.vocabulary} tokens, but the data has token {int(x.max())}; "
                "the data needs the tokenizer of this encoder"
            )
        return x[:, : max(int((x >= 0).sum(1).max()), 1)]


@register("bert")
@dataclass(frozen=True)
class Bert:
    """A transformer of the BERT family: `tiny`, `minilm`, a folder, or a name of the Hugging Face hub.

    `trainable_layers` says how many of the last layers train; the embeddings of tokens do only with `all`.
    """

    name: ClassVar[str]
    path: str = "tiny"
    trainable_layers: int | Literal["all"] = "all"
    pooling: Literal["mean", "cls"] = "mean"
    embedding: int | None = 128
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.trainable_layers != "all":
            at_least("bert", 0, trainable_layers=self.trainable_layers)
        if self.embedding is not None:
            at_least("bert", 1, embedding=self.embedding)
        if not 0 <= self.dropout < 1:
            raise ProtofedError(f"model 'bert': dropout={self.dropout}; expected 0 or a share below 1")

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        if len(sample_shape) != 1:
            raise ProtofedError(
                f"model 'bert' needs token ids [length]; a sample has shape {list(sample_shape)}. "
                "It is for text data (data=text)"
            )
        network = _loaded(self.path)
        config = network.config
        layers = config.num_hidden_layers
        if self.trainable_layers != "all" and self.trainable_layers > layers:
            raise ProtofedError(
                f"model 'bert': trainable_layers={self.trainable_layers}, but {self.path!r} has {layers} layers"
            )
        longest = config.max_position_embeddings
        if "roberta" in config.model_type or config.model_type == "camembert":
            longest -= config.pad_token_id + 1  # these families count positions from there
        if sample_shape[0] > longest:
            raise ProtofedError(
                f"model 'bert': {self.path!r} takes at most {longest} tokens; a sample has {sample_shape[0]}. "
                "Lower data.length"
            )
        frozen = 0 if self.trainable_layers == "all" else 1 + layers - self.trainable_layers
        dim = config.hidden_size if self.embedding is None else self.embedding
        encoder = TextEncoder(network, frozen, self.pooling, dim, self.dropout)
        return Classifier(encoder, dim, num_classes, owner="model 'bert'")
