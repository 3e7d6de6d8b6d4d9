"""Readers of data files: federated data sets, or sets of images that a partition divides among clients.

Each names the file and the line of whatever is wrong.
"""

from fedkeep.data.readers.cifar import cifar10, cifar100
from fedkeep.data.readers.fdu_mtl import fdu_mtl
from fedkeep.data.readers.huggingface import huggingface
from fedkeep.data.readers.idx import fashion_mnist
from fedkeep.data.readers.movielens import movielens
from fedkeep.data.readers.reviews import review_files
from fedkeep.data.readers.tables import read_table
from fedkeep.data.readers.tang import tang
from fedkeep.data.readers.zulip import zulip_channels

__all__ = [
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "fdu_mtl",
    "huggingface",
    "movielens",
    "read_table",
    "review_files",
    "tang",
    "zulip_channels",
]
