"""Layers: recurrent and convolutional ones on the native kernels, and pooling over time."""

from fedkeep.nn.convolution import ConvPool
from fedkeep.nn.linear_layer import Linear
from fedkeep.nn.pure import masked_max, masked_mean
from fedkeep.nn.recurrent import GRU, LSTM

__all__ = ["GRU", "LSTM", "ConvPool", "Linear", "masked_max", "masked_mean"]
