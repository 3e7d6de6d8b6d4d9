"""FURL (arXiv:1909.12535): Table 3, Figures 2-5, and the sweep of its learning rates."""
