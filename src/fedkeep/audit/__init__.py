"""Audits: what leaves a device in a few rounds with canaries, and whether anybody has declared it."""

from fedkeep.audit.audit import audit
from fedkeep.audit.findings import PROTOCOL, Finding, Leaving
from fedkeep.audit.report import AuditReport

__all__ = ["PROTOCOL", "AuditReport", "Finding", "Leaving", "audit"]
