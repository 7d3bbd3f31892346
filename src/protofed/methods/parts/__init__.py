"""What methods are composed of: feeds, reduces, predictions and loss terms."""

from .feed import Batch, Episodes, Epochs, Feed, Paired, Step, Unlabelled, View
from .predict import Head, Helpers, Nearest, Predict
from .received import Received, bank_of
from .reduce import Each, Mean, Median, Reduce, Reduced, Running, Trimmed, Upload, weighted_average
from .terms import CE, Align, Contrast, Peers, Proximal, Proxy, Spread, Term, terms_of

__all__ = [
    "CE",
    "Align",
    "Batch",
    "Contrast",
    "Each",
    "Episodes",
    "Epochs",
    "Feed",
    "Head",
    "Helpers",
    "Mean",
    "Median",
    "Nearest",
    "Paired",
    "Peers",
    "Predict",
    "Proximal",
    "Proxy",
    "Received",
    "Reduce",
    "Reduced",
    "Running",
    "Spread",
    "Step",
    "Term",
    "Trimmed",
    "Unlabelled",
    "Upload",
    "View",
    "bank_of",
    "terms_of",
    "weighted_average",
]
