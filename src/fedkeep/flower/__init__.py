"""Flower: the transport of ``fedkeep.remote`` across real processes and machines; the one room that knows Flower."""
