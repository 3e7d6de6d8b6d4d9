"""Secure sums: a server adds vectors of which it sees none, and learns the sum alone.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, figure 4, the
version for a server that is curious and honest. Here are both sides' states and messages, without any transport.
"""
