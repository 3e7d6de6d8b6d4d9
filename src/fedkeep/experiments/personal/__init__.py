"""Clients' own models after federation: adapted, measured on few examples, tested on the way, written and read."""
