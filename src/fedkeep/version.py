"""The version, apart from the package's front, so that every room may know it."""

__version__ = "0.1.0"
