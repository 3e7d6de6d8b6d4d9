"""The federated mixture of experts (arXiv:2010.02056): Table 2, Figures 2-5, variants, and other methods."""
