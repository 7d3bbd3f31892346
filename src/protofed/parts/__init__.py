"""What methods are composed of and wrapped in: feeds, reduces, server steps, predictions, loss terms and filters."""

from .compression import BFloat16, Changed, Float16, Quantise, TopK
from .feed import Batch, Episodes, Epochs, Feed, Paired, Step, Unlabelled, View
from .filters import Clip, Filter
from .predict import Head, Helpers, Mix, Nearest, Predict
from .received import Received, bank_of
from .reduce import Each, Mean, Personal, Reduce, Reduced, Running, Upload, weighted_average
from .robust import Bounded, GeometricMedian, Krum, Median, MultiKrum, Robust, Trimmed
from .server_steps import Forget, Momentum, Refine, ServerRound, ServerStep, Sphere, ages
from .terms import CE, Align, Contrast, Peers, Proximal, Proxy, Spread, Term, terms_of
from .unlabelled import Ignored, NearestLabels, UnlabelledSamples, Unsupervised

__all__ = [
    "CE",
    "Align",
    "BFloat16",
    "Batch",
    "Bounded",
    "Changed",
    "Clip",
    "Contrast",
    "Each",
    "Episodes",
    "Epochs",
    "Feed",
    "Filter",
    "Float16",
    "Forget",
    "GeometricMedian",
    "Head",
    "Helpers",
    "Ignored",
    "Krum",
    "Mean",
    "Median",
    "Mix",
    "Momentum",
    "MultiKrum",
    "Nearest",
    "NearestLabels",
    "Paired",
    "Peers",
    "Personal",
    "Predict",
    "Proximal",
    "Proxy",
    "Quantise",
    "Received",
    "Reduce",
    "Reduced",
    "Refine",
    "Robust",
    "Running",
    "ServerRound",
    "ServerStep",
    "Sphere",
    "Spread",
    "Step",
    "Term",
    "TopK",
    "Trimmed",
    "Unlabelled",
    "UnlabelledSamples",
    "Unsupervised",
    "Upload",
    "View",
    "ages",
    "bank_of",
    "terms_of",
    "weighted_average",
]
