"""What travels. Everything a client and the server send each other is a `Bundle`, encoded here and nowhere else.

The encoding is safetensors. Of a bank only the known rows travel, with their class numbers and counts. Bytes are
counted by kind: `prototypes` (rows of banks), `weights` (model parameters and buffers), `scalars` (counts, class
numbers, other small values and tensors) and `framing` (header and padding), which together are the whole message.
"""

from .bundle import Bundle, Message, WireError
from .codec import add_sizes, decode, decode_each, encode, encoded_sizes, sizes
from .exchange import Exchange, Expected, Part, array, bank, models, number, weights
from .frame import BYTE_KINDS

__all__ = [
    "BYTE_KINDS",
    "Bundle",
    "Exchange",
    "Expected",
    "Message",
    "Part",
    "WireError",
    "add_sizes",
    "array",
    "bank",
    "decode",
    "decode_each",
    "encode",
    "encoded_sizes",
    "models",
    "number",
    "sizes",
    "weights",
]
