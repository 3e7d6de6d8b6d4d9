"""Networks: FURL's document model and its multi-task form, text classifiers, CNNs, mixtures, linear, factorisation."""

from fedkeep.models.cnn import CNN, CifarCNN, FashionCNN
from fedkeep.models.document import DocumentModel
from fedkeep.models.factorization import MatrixFactorization
from fedkeep.models.linear import Linear
from fedkeep.models.mixture import ConfidenceGate, Gate, MixtureOfExperts
from fedkeep.models.multitask import MultiTaskDocument
from fedkeep.models.text import TextClassifier
from fedkeep.models.words import BagOfWords

__all__ = [
    "CNN",
    "BagOfWords",
    "CifarCNN",
    "ConfidenceGate",
    "DocumentModel",
    "FashionCNN",
    "Gate",
    "Linear",
    "MatrixFactorization",
    "MixtureOfExperts",
    "MultiTaskDocument",
    "TextClassifier",
]
