"""Federated data sets: columns of examples, where each client's rows lie, readers and generators."""

from fedkeep.data.federated import SPLITS, FederatedData, Ragged, RangeIds
from fedkeep.data.hashing import HashedWords
from fedkeep.data.readers import huggingface, movielens, read_table, zulip_channels
from fedkeep.data.splits import hold_out
from fedkeep.data.synthetic import many_user_text, toy, user_bias_regression
from fedkeep.data.text import CharVocabulary, WordVocabulary, vocabulary_from

__all__ = [
    "SPLITS",
    "CharVocabulary",
    "FederatedData",
    "HashedWords",
    "Ragged",
    "RangeIds",
    "WordVocabulary",
    "hold_out",
    "huggingface",
    "many_user_text",
    "movielens",
    "read_table",
    "toy",
    "user_bias_regression",
    "vocabulary_from",
    "zulip_channels",
]
