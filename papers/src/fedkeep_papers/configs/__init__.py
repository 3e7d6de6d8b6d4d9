"""Configurations of the papers: TOML files, found by the names of their folders and files."""
