"""Attacks as measurements: what uploads and models are worth to an attacker.

Each function's docstring says what the attacker knows and sees, and what guessing gives. None of them protects
anybody: an attack that finds nothing here may be a weak one. ``experiments.attack`` runs them against a
configuration and its protections.
"""

from fedkeep.attacks.inputs import invert_image, psnr, rows_seen, words_f1
from fedkeep.attacks.membership import FPR, confidence, guessed_tpr, lira, membership, tpr_at
from fedkeep.attacks.sightings import Observed, Sighting, one_by_one, summed, watch
from fedkeep.attacks.vector_attack import place_of, vector_from_predictions, vector_in_upload
from fedkeep.attacks.who import label_guesses, likeness, present, recognised, trait_guesses

__all__ = [
    "FPR",
    "Observed",
    "Sighting",
    "confidence",
    "guessed_tpr",
    "invert_image",
    "label_guesses",
    "likeness",
    "lira",
    "membership",
    "one_by_one",
    "place_of",
    "present",
    "psnr",
    "recognised",
    "rows_seen",
    "summed",
    "tpr_at",
    "trait_guesses",
    "vector_from_predictions",
    "vector_in_upload",
    "watch",
    "words_f1",
]
