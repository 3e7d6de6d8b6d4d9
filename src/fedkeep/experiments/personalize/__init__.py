"""Clients' own models after federation.

    adapting        lets clients adapt on the device that holds them, also in processes side by side
    adapted_runs    runs whose clients have adapted: by the run's method, or by another one that starts from its values
    cold_start      measures a metric against the number of own examples, on clients that were not in federation
    fine_tuning     measures the curve of each client's accuracy while a copy of its whole model is trained further
    kept            keeps in a run's folder what clients have adapted to, and what they are adapting to
    exported        writes clients' models into a folder, and loads them

What runs on a device is in ``engines.adapt``. Nothing is uploaded.
"""

from fedkeep.engines.adapt import FineTuning
from fedkeep.experiments.personalize.adapted_runs import adapt_clients, rooted
from fedkeep.experiments.personalize.cold_start import ColdStart, cold_start
from fedkeep.experiments.personalize.exported import Exported, export_models, load_encoding, load_model
from fedkeep.experiments.personalize.fine_tuning import Curves, add_curve, personalization_curve

__all__ = [
    "ColdStart",
    "Curves",
    "Exported",
    "FineTuning",
    "adapt_clients",
    "add_curve",
    "cold_start",
    "export_models",
    "load_encoding",
    "load_model",
    "personalization_curve",
    "rooted",
]
