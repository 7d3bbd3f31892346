"""The audit: what the next message of a client would give away, by itself and to an attacker."""

from .conduct import Audit, RunAudit, audit, audit_numbers

__all__ = ["Audit", "RunAudit", "audit", "audit_numbers"]
