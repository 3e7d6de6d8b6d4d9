"""What the papers share: the store of finished cells, and figures of the same charts as a report's."""
