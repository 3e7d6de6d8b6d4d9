"""Networks: FURL's document model, its multi-task form, a bag of words, a linear model, matrix factorisation."""

from fedkeep.models.document import DocumentModel
from fedkeep.models.factorization import MatrixFactorization
from fedkeep.models.linear import Linear
from fedkeep.models.multitask import MultiTaskDocument
from fedkeep.models.words import BagOfWords

__all__ = ["BagOfWords", "DocumentModel", "Linear", "MatrixFactorization", "MultiTaskDocument"]
