"""Readers of data files into federated data sets. Each names the file and the line of whatever is wrong."""

from fedkeep.data.readers.huggingface import huggingface
from fedkeep.data.readers.movielens import movielens
from fedkeep.data.readers.tables import read_table
from fedkeep.data.readers.zulip import zulip_channels

__all__ = ["huggingface", "movielens", "read_table", "zulip_channels"]
