"""KTEPS (arXiv:2107.11956): Tables 2 to 8, Figures 4 and 5, and variants."""
