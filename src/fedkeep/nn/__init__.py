"""Layers: recurrent layers on the native kernels, and pooling over time."""

from fedkeep.nn.pooling import masked_max, masked_mean
from fedkeep.nn.recurrent import GRU, LSTM

__all__ = ["GRU", "LSTM", "masked_max", "masked_mean"]
