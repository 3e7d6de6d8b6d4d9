"""Metrics: accuracy, AUC, distributions over clients, bytes, and numbers that describe user vectors.

Everything is a pure function of tensors or arrays. A number that is not defined (an AUC with one class, a
silhouette with one trait) comes back as NaN; its function says when.
"""

from fedkeep.metrics.clients import ClientSummary, per_client
from fedkeep.metrics.embedding import (
    Tsne,
    chance_agreement,
    knn_agreement,
    knn_r2,
    linear_cka,
    silhouette,
    tsne,
)
from fedkeep.metrics.personalization import Personalized, ag, ap
from fedkeep.metrics.scores import accuracy, auc, traffic

__all__ = [
    "ClientSummary",
    "Personalized",
    "Tsne",
    "accuracy",
    "ag",
    "ap",
    "auc",
    "chance_agreement",
    "knn_agreement",
    "knn_r2",
    "linear_cka",
    "per_client",
    "silhouette",
    "traffic",
    "tsne",
]
