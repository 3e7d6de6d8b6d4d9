"""Readers of data files: federated data sets, or sets of images that a partition divides among clients.

Each names the file and the line of whatever is wrong.
"""

from fedkeep.data.readers.cifar import cifar10, cifar100
from fedkeep.data.readers.huggingface import huggingface
from fedkeep.data.readers.idx import fashion_mnist
from fedkeep.data.readers.movielens import movielens
from fedkeep.data.readers.npz import npz_images
from fedkeep.data.readers.reviews import review_files
from fedkeep.data.readers.tables import read_table

__all__ = [
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "huggingface",
    "movielens",
    "npz_images",
    "read_table",
    "review_files",
]
