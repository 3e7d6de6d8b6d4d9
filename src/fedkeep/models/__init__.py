"""Networks: FURL's document model and its multi-task form, text classifiers, CNNs, mixtures, linear, factorisation,
MLP, a GRU for series of numbers.
"""

from fedkeep.models.cnn import CNN, CifarCNN, FashionCNN
from fedkeep.models.linear import Linear, MatrixFactorization
from fedkeep.models.mixture_model import ConfidenceGate, Gate, MixtureOfExperts
from fedkeep.models.plain import MLP, ResNet, SequenceClassifier
from fedkeep.models.text_models import BagOfWords, DocumentModel, MultiTaskDocument, TextClassifier

__all__ = [
    "CNN",
    "MLP",
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
    "ResNet",
    "SequenceClassifier",
    "TextClassifier",
]
