"""Adapters on a pretrained transformer, federated and private, for messages of natural users."""
