"""Metrics of a classifier, from the outputs for all samples; scikit-learn and scipy do the counting.

Metrics are computed once from the outputs of all ranks, sorted by sample, so that they are the same at any world size.
Both libraries are imported where something is counted: they take seconds, which a question about a text need not wait
for.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, assert_never

import numpy as np

from kubetune.data.text.class_labels import Labels

if TYPE_CHECKING:
    from numpy.typing import NDArray


def measure(
    labels: Labels,
    logits: NDArray[np.float64],
    targets: NDArray[np.float64],
) -> dict[str, float]:
    """Return metrics named `eval_…` from `logits` `[samples, outputs]` and `targets` `[samples, width]`.

    A mean over the classes is one over those that occur or are predicted, as scikit-learn takes it.
    """
    with warnings.catch_warnings():
        # A class that occurs and is never predicted, or the other way round, counts as 0. scikit-learn warns of that.
        warnings.simplefilter("ignore", UserWarning)
        match labels.problem_type:
            case "regression":
                values = _regression(logits[:, 0], targets[:, 0])
            case "multi_label_classification":
                values = _multi_label(logits, targets)
            case "single_label_classification":
                values = _single_label(logits, targets[:, 0].astype(np.int64))
            case unknown:
                assert_never(unknown)

    return {f"eval_{name}": float(value) for name, value in values.items()}


def losses_of(
    labels: Labels,
    logits: NDArray[np.float64],
    targets: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the loss of each sample, `[samples]`. Their mean is `eval_loss`."""
    result: NDArray[np.float64]
    match labels.problem_type:
        case "regression":
            result = (logits[:, 0] - targets[:, 0]) ** 2
        case "multi_label_classification":
            # log(1 + e^z) - y z is -log σ(z) for y = 1 and -log σ(-z) for y = 0.
            result = (np.logaddexp(0.0, logits) - (targets > 0.5) * logits).mean(1)
        case "single_label_classification":
            # The loss of one label is -log p of that label's class.
            classes = targets[:, 0].astype(np.int64)
            result = -_log_softmax(logits)[np.arange(len(logits)), classes]
        case unknown:
            assert_never(unknown)
    return result


def count_confusions(
    labels: Labels,
    logits: NDArray[np.float64],
    targets: NDArray[np.float64],
) -> list[list[int]]:
    """Return how often class i (row) was taken for class j (column); for single labels only."""
    from sklearn import metrics

    # Rows are what is true, columns what was predicted.
    true = targets[:, 0].astype(np.int64)
    classes = range(len(labels.names))  # also those that do not occur
    matrix = metrics.confusion_matrix(true, logits.argmax(1), labels=classes)
    counts: list[list[int]] = matrix.tolist()
    return counts


def probabilities(labels: Labels, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability of each class, `[samples, outputs]`; of regression, the values themselves."""
    match labels.problem_type:
        case "regression":
            return logits
        case "multi_label_classification":
            # Each class by itself: several may apply.
            return np.exp(-np.logaddexp(0.0, -logits))  # σ, without overflow
        case "single_label_classification":
            return np.exp(_log_softmax(logits))
        case unknown:
            assert_never(unknown)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    # Shifted so that the largest is 0, and e^z cannot overflow.
    shifted = logits - logits.max(1, keepdims=True)

    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def _single_label(logits: NDArray[np.float64], true: NDArray[np.int64]) -> dict[str, Any]:
    from sklearn import metrics

    predicted = logits.argmax(1)
    values = {
        "loss": -_log_softmax(logits)[np.arange(len(true)), true].mean(),
        "accuracy": metrics.accuracy_score(true, predicted),
        "f1_macro": metrics.f1_score(true, predicted, average="macro"),
        "matthews_correlation": metrics.matthews_corrcoef(true, predicted),
    }

    # Of two classes precision and recall are those of class 1, of more the mean over the classes.
    average = "macro"
    if logits.shape[1] == 2:
        average = "binary"
        values["f1"] = metrics.f1_score(true, predicted)
    values["precision"] = metrics.precision_score(true, predicted, average=average)
    values["recall"] = metrics.recall_score(true, predicted, average=average)
    return values


def _multi_label(logits: NDArray[np.float64], true: NDArray[np.float64]) -> dict[str, Any]:
    from sklearn import metrics

    predicted = logits > 0
    expected = true > 0.5

    # Classes that neither occur nor are predicted would count as 0.
    occurs = predicted.any(0) | expected.any(0)
    f1_macro = 0.0
    if occurs.any():
        f1_macro = metrics.f1_score(expected[:, occurs], predicted[:, occurs], average="macro")

    return {
        "loss": (np.logaddexp(0.0, logits) - true * logits).mean(),
        "accuracy": metrics.accuracy_score(expected, predicted),
        "f1_macro": f1_macro,
        "f1_micro": metrics.f1_score(expected, predicted, average="micro"),
        "precision": metrics.precision_score(expected, predicted, average="micro"),
        "recall": metrics.recall_score(expected, predicted, average="micro"),
    }


def _regression(predicted: NDArray[np.float64], true: NDArray[np.float64]) -> dict[str, Any]:
    from sklearn import metrics

    values = {
        "loss": metrics.mean_squared_error(true, predicted),
        "mae": metrics.mean_absolute_error(true, predicted),
        "pearson": 0.0,
        "spearman": 0.0,
    }

    # A constant correlates with nothing.
    if len(true) > 1 and np.ptp(predicted) > 0 and np.ptp(true) > 0:
        from scipy.stats import pearsonr, spearmanr

        values["pearson"] = pearsonr(predicted, true).statistic
        values["spearman"] = spearmanr(predicted, true).statistic

    return values
