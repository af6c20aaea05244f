"""Calibration of the probabilities that a reward model gives to pairs. Host side, float64."""

import dataclasses

import numpy as np
from jaxtyping import Float, Integer, Shaped

from jaxrl_llm.ground.ranges import in_range

PerBin = Float[np.ndarray, "n"]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Pair accuracy, Brier score and the reliability curve; nan where there is nothing to average.

    Bins are equal parts of the confidence, from 1/2 to 1; `expected_error` is the mean over pairs of the distance of
    their bin's accuracy from its confidence, 0 in a calibrated model.
    """

    accuracy: float
    brier: float
    expected_error: float
    bin_confidence: PerBin
    bin_accuracy: PerBin
    bin_pairs: Integer[np.ndarray, "n"]


def calibrate(margins: Shaped[np.ndarray, "p"], *, bins: int = 10) -> Calibration:
    """Calibration of p = sigma(margin), with margin = reward(chosen) - reward(rejected) of a held-out pair.

    A pair counts 1/2 for accuracy if margin = 0; brier = mean of (1 - p)^2. A coin has 1/2 and 1/4. The order of a pair
    carries no information, so a pair is right or wrong with confidence max(p, 1 - p).

    Raises:
      ValueError: no pairs, a margin that is not finite, or bins below 1.

    Source: Brier 1950 (doi 10.1175/1520-0493(1950)078<0001:VOFEIT>2.0.CO;2); reliability curve and expected
    calibration error: arXiv 1706.04599 eqs 2-5.
    """
    in_range("bins", bins, least=1)
    margins = np.asarray(margins, np.float64)
    if not margins.size or not np.isfinite(margins).all():
        raise ValueError(
            f"margins holds {margins.size} numbers, {int((~np.isfinite(margins)).sum())} of them not finite; give the "
            "finite reward difference of at least one pair"
        )
    size = np.abs(margins)
    confidence = 1 / (1 + np.exp(-size))
    right = np.where(margins == 0, 0.5, margins > 0)
    missing = np.exp(-np.logaddexp(0, margins))  # 1 - p, exact where p is close to 1
    place = np.minimum((2 * (confidence - 0.5) * bins).astype(int), bins - 1)
    pairs = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        bin_confidence = np.bincount(place, confidence, bins) / pairs
        bin_accuracy = np.bincount(place, right, bins) / pairs
    distance = np.abs(bin_accuracy - bin_confidence)[pairs > 0]
    accuracy, brier = float(right.mean()), float((missing**2).mean())
    expected_error = float(distance @ pairs[pairs > 0] / margins.size)
    return Calibration(accuracy, brier, expected_error, bin_confidence, bin_accuracy, pairs)
