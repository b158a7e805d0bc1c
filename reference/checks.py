"""Ranges of numbers in a config, and the limits that hold for all of them."""

from tiers.reference.errors import ConfigError

# Far beyond any model: sizes that no weights have would take memory, or time, before they are compared with weights.
MAX_SIZE = 2**24
# Elements of a table of positions, rows times channels or heads; it is the only thing whose size no weight confirms.
MAX_TABLE = 2**31


def positive(**values: int | float | None) -> None:
    """Raises:
    ConfigError: one of the values is there and not above 0.
    """
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{name} is {value}; expected a number above 0")


def at_most(limit: int, **values: int | None) -> None:
    """Raises:
    ConfigError: one of the values is there and above the limit.
    """
    for name, value in values.items():
        if value is not None and value > limit:
            raise ConfigError(f"{name} is {value}; expected at most {limit}")


def not_negative(**values: int | float | None) -> None:
    """Raises:
    ConfigError: one of the values is there and below 0.
    """
    for name, value in values.items():
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}; expected 0 or more")
