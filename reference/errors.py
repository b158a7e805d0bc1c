"""Errors that are a user's to solve: one paragraph that says what, where, found, expected, and what to do."""

# Names and values out of a damaged file can be of any length.
_LONGEST = 1400


class TiersError(ValueError):
    """Base of every error that the command line prints without a traceback.

    The message becomes one paragraph: white space collapsed, what cannot be printed escaped, cut to a length for reading.
    """

    def __init__(self, message: str = "") -> None:
        text = " ".join(str(message).split())
        text = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}")


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
