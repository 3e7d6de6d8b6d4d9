"""Published numbers of the federated mixture of experts (arXiv:2010.02056), as fractions."""

from __future__ import annotations

# Table 2: CIFAR-10, 5 clients, 500 images, q = 0, four runs: by p and method, (mean, deviation).
TABLE2: dict[float, dict[str, tuple[float, float]]] = {
    1.0: {
        "FedAvg": (0.2735, 0.0327),
        "Local": (0.8405, 0.0184),
        "Fine-tuned": (0.8530, 0.0330),
        "Mixture": (0.8645, 0.0528),
    },
    0.9: {
        "FedAvg": (0.3505, 0.0347),
        "Local": (0.7505, 0.0369),
        "Fine-tuned": (0.7521, 0.0288),
        "Mixture": (0.7535, 0.0262),
    },
    0.8: {
        "FedAvg": (0.3914, 0.0332),
        "Local": (0.6566, 0.0137),
        "Fine-tuned": (0.6561, 0.0152),
        "Mixture": (0.6717, 0.0196),
    },
}

# A plot in the authors' repository of 23 November 2020 (50 clients, 100 images each), read by eye to about a point; it
# is not certain to be the printed Figure 2. p = 0.2 to 1.0 in steps of 0.1.
FIGURE2_P = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FIGURE2: dict[str, tuple[float, ...]] = {
    "Mixture": (0.15, 0.22, 0.29, 0.37, 0.45, 0.53, 0.61, 0.70, 0.81),
    "Local": (0.095, 0.165, 0.23, 0.295, 0.36, 0.45, 0.54, 0.64, 0.805),
    "Fine-tuned": (0.115, 0.14, 0.19, 0.31, 0.44, 0.53, 0.57, 0.585, 0.685),
    "FedAvg": (0.105, 0.10, 0.08, 0.075, 0.065, 0.035, 0.025, 0.015, 0.01),
}
