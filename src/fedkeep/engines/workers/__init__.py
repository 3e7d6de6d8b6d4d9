"""Clients side by side in processes of one thread each."""
