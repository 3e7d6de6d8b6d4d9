"""Embedding tables trained and sent by the rows that a client's examples use."""
