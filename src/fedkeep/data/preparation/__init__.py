"""Preparation, round 0: devices sum up their data, the server makes one encoding, devices encode by it.

It stands inside the room of data, as readers make their data by the same path, with one device that has all clients.

    Source ──summary(rules)──▶ Summary ──merged/agreeing──▶ Summary of all ──Encoding.of──▶ Encoding
       └──────────────────────encoded(encoding)──▶ FederatedData ◀──────────────────────────────┘
"""

from fedkeep.data.preparation.contract import Code, ColumnSummary, RawColumn, RuleError, Rules
from fedkeep.data.preparation.encoding import Encoding
from fedkeep.data.preparation.feature_columns import Features, Target, Targets
from fedkeep.data.preparation.label_columns import Labels, LabelSets
from fedkeep.data.preparation.numbers import KeyColumn, Plain, Times
from fedkeep.data.preparation.series_columns import Series
from fedkeep.data.preparation.source import Raw, Ready, Source, encoded_alone, prepared
from fedkeep.data.preparation.summary import About, Summary, agreeing, merged
from fedkeep.data.preparation.texts import Texts

__all__ = [
    "About",
    "Code",
    "ColumnSummary",
    "Encoding",
    "Features",
    "KeyColumn",
    "LabelSets",
    "Labels",
    "Plain",
    "Raw",
    "RawColumn",
    "Ready",
    "RuleError",
    "Rules",
    "Series",
    "Source",
    "Summary",
    "Target",
    "Targets",
    "Texts",
    "Times",
    "agreeing",
    "encoded_alone",
    "merged",
    "prepared",
]
