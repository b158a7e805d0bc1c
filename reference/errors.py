"""Errors that are a user's to solve: one paragraph that says what, where, found, expected, and what to do."""


class TiersError(ValueError):
    """Base of every error that the command line prints without a traceback."""


class ConfigError(TiersError):
    """config.json does not describe a model: wrong key, type, value, or values that do not fit each other."""


class FamilyError(TiersError):
    """A family file is not there, cannot be read, or says something that has no meaning."""


class CheckpointError(TiersError):
    """The weight files are incomplete, damaged, or do not hold the tensors that the config calls for."""


class PlanError(TiersError):
    """A tier plan names something that does not exist or cannot serve here."""


class ServingError(TiersError):
    """The model is sound, but not servable with the engine options given."""
