"""Readers of data files: federated data sets, or sets of images that a partition divides among clients.

Those called ``raw_…`` give a source instead, whose texts and labels are not numbered yet (`fedkeep.data.preparation`).
Each names the file and the line of whatever is wrong.
"""

from fedkeep.data.readers.cifar import cifar10, cifar100
from fedkeep.data.readers.huggingface import huggingface, raw_huggingface
from fedkeep.data.readers.image_files import fashion_mnist, npz_images
from fedkeep.data.readers.image_folder import image_folder, raw_image_folder
from fedkeep.data.readers.insteval import insteval, raw_insteval
from fedkeep.data.readers.leaf import leaf, raw_leaf
from fedkeep.data.readers.movielens import (
    movielens,
    movielens_100k,
    movielens_100k_ranking,
    raw_movielens,
    raw_movielens_100k,
)
from fedkeep.data.readers.review_files import raw_review_files, review_files
from fedkeep.data.readers.shakespeare import shakespeare
from fedkeep.data.readers.tables import raw_table, read_table
from fedkeep.data.readers.tars import raw_tars, tars

__all__ = [
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "huggingface",
    "image_folder",
    "insteval",
    "leaf",
    "movielens",
    "movielens_100k",
    "movielens_100k_ranking",
    "npz_images",
    "raw_huggingface",
    "raw_image_folder",
    "raw_insteval",
    "raw_leaf",
    "raw_movielens",
    "raw_movielens_100k",
    "raw_review_files",
    "raw_table",
    "raw_tars",
    "read_table",
    "review_files",
    "shakespeare",
    "tars",
]
