"""Networks: FURL's document model and its multi-task form, text classifiers, small CNNs, linear, factorisation."""

from fedkeep.models.cnn import CNN, CifarCNN, FashionCNN, Gate
from fedkeep.models.document import DocumentModel
from fedkeep.models.factorization import MatrixFactorization
from fedkeep.models.linear import Linear
from fedkeep.models.multitask import MultiTaskDocument
from fedkeep.models.text import TextClassifier
from fedkeep.models.words import BagOfWords

__all__ = [
    "CNN",
    "BagOfWords",
    "CifarCNN",
    "DocumentModel",
    "FashionCNN",
    "Gate",
    "Linear",
    "MatrixFactorization",
    "MultiTaskDocument",
    "TextClassifier",
]
