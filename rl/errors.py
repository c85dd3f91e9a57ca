"""Errors that a user can mend. The commands print them as one line and exit with status 2."""

from __future__ import annotations


class UserError(Exception):
    """Base of the errors whose message is for the user: what, which value, what was expected."""


class ConfigError(UserError):
    """A configuration key, value or combination that cannot work."""


class DataError(UserError):
    """Input data or a model folder that is missing, empty or malformed."""


class ClusterError(UserError):
    """Ray did not start on this machine, or cannot give what a run needs."""


class NodeLost(UserError):
    """A node of the cluster died while the run was on it; the run can go on from its last checkpoint."""


class DiskFull(UserError):
    """There is no room for what a run writes."""


class SpecMismatch(UserError):
    """Learner, sampler and weight sync did not resolve the same execution specification."""
