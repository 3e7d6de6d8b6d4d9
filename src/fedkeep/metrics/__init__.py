"""Metrics: AUC, balanced accuracy, macro-F1, distributions over clients, and numbers that describe user vectors.

Everything is a pure function of tensors or arrays. A number that is not defined (an AUC with one class, a
silhouette with one trait) comes back as NaN; its function says when.
"""

from fedkeep.metrics.embedding import (
    UserMap,
    chance_agreement,
    knn_agreement,
    knn_r2,
    linear_cka,
    principal_components,
    silhouette,
    tsne,
    user_map,
)
from fedkeep.metrics.scores import (
    CLASS_METRICS,
    ClientSummary,
    Personalized,
    ag,
    ap,
    auc,
    balanced_accuracy,
    macro_f1,
    mean_iou,
    per_client,
)

__all__ = [
    "CLASS_METRICS",
    "ClientSummary",
    "Personalized",
    "UserMap",
    "ag",
    "ap",
    "auc",
    "balanced_accuracy",
    "chance_agreement",
    "knn_agreement",
    "knn_r2",
    "linear_cka",
    "macro_f1",
    "mean_iou",
    "per_client",
    "principal_components",
    "silhouette",
    "tsne",
    "user_map",
]
