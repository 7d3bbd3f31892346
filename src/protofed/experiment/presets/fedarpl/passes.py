"""Fed-ARPL, appendix F: how often a sample goes through the network in a client's round."""

from __future__ import annotations

from .. import Counts

EPOCHS = 5
HALF = 0.5  # of the samples, as an example of how many SemiFL is confident of
TRAINED = 3  # a pass forward, and one backward that counts as two
STATISTICS = 1  # static batch norm's, after the training
CONFIDENCE = 1  # of the received model, for what the client returns


def of_semifl(confident: float) -> float:
    """Count SemiFL's passes as in its authors' code, which trains on the samples that it is confident of alone.

    Args:
        confident: Their share. At 1 it is what ours takes whatever the share is.

    Returns:
        The passes of each of a client's samples in a round.
    """
    return 1 + confident * EPOCHS * 2 * TRAINED + CONFIDENCE + STATISTICS


def counts() -> Counts:
    """Count the views that are trained on, the passes that label them, and those after the training.

    SemiFL trains on a strong view and a mixture, (FL)² on a strong view once for its labels, once for the direction of
    sharpness and once at the sharpest point; both label samples once a round. Fed-ARPL trains on a strong view and labels
    a new weak view in each epoch; in phase 3 a pass of the trained model makes the prototypes.
    """
    after = CONFIDENCE + STATISTICS
    fedarpl = EPOCHS * (1 + TRAINED) + after
    passes = {
        "SemiFL": of_semifl(1),
        "SemiFL, confident samples alone (half)": of_semifl(HALF),
        "(FL)²": 1 + EPOCHS * 3 * TRAINED + after,
        "Fed-ARPL, phase 1": fedarpl,
        "Fed-ARPL, phase 2": fedarpl,
        "Fed-ARPL, phase 3": fedarpl + 1,
    }
    return {"passes": {row: [number] for row, number in passes.items()}}
