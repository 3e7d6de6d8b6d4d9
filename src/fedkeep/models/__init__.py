"""Networks: FURL's document model, its multi-task form, and matrix factorisation."""

from fedkeep.models.document import DocumentModel
from fedkeep.models.factorization import MatrixFactorization
from fedkeep.models.linear import Linear
from fedkeep.models.multitask import MultiTaskDocument

__all__ = ["DocumentModel", "Linear", "MatrixFactorization", "MultiTaskDocument"]
