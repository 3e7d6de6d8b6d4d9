"""What the papers share: the store of finished cells, and figures as PNG or SVG."""
