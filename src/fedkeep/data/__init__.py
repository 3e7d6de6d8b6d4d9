"""Federated data sets: columns of examples, where each client's rows lie, readers and generators."""

from fedkeep.data.consent import add_censored, opt_out
from fedkeep.data.federated import SPLITS, FederatedData, Ragged, RangeIds
from fedkeep.data.ids import SomeIds
from fedkeep.data.images import ImageSet
from fedkeep.data.partition import (
    PARTITIONS,
    by_size,
    class_counts,
    dirichlet,
    feature_shift,
    majority,
    shards,
)
from fedkeep.data.readers import (
    cifar10,
    cifar100,
    fashion_mnist,
    huggingface,
    movielens,
    read_table,
    review_files,
)
from fedkeep.data.splits import hold_out
from fedkeep.data.synthetic import many_user_text, toy
from fedkeep.data.text import (
    CharVocabulary,
    HashedWords,
    TextStatistics,
    TokenVocabulary,
    UnicodeWords,
    WordVocabulary,
    next_tokens,
    text_statistics,
    vocabulary_from,
)
from fedkeep.data.vectors import WordVectors, read_word_vectors

__all__ = [
    "PARTITIONS",
    "SPLITS",
    "CharVocabulary",
    "FederatedData",
    "HashedWords",
    "ImageSet",
    "Ragged",
    "RangeIds",
    "SomeIds",
    "TextStatistics",
    "TokenVocabulary",
    "UnicodeWords",
    "WordVectors",
    "WordVocabulary",
    "add_censored",
    "by_size",
    "cifar10",
    "cifar100",
    "class_counts",
    "dirichlet",
    "fashion_mnist",
    "feature_shift",
    "hold_out",
    "huggingface",
    "majority",
    "many_user_text",
    "movielens",
    "next_tokens",
    "opt_out",
    "read_table",
    "read_word_vectors",
    "review_files",
    "shards",
    "text_statistics",
    "toy",
    "vocabulary_from",
]
