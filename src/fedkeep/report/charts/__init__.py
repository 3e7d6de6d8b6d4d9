"""Charts of the page as inline SVG.

Each is drawn twice, wide and narrow, or as panels, so that its text keeps its size on a phone. Hover texts are SVG
titles, so they work without a script. Colours follow Okabe and Ito (colour-blind safe); lines also differ by
dashes and marks by shape. Colours themselves stand in the page's CSS: ``s0`` to ``s7``, ``sx`` grey, ``q0`` to ``q8``.
"""

SLOTS = 8
RAMP = 9
WIDE = 900.0
NARROW = 350.0
PANEL = 430.0
