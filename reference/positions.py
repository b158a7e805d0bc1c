"""How a model knows where its tokens stand: the objects that `mixer.position` of a config.json describes."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from tiers.reference.checks import MAX_SIZE, MAX_TABLE, at_most, positive
from tiers.reference.errors import ConfigError

# ---- scalings of rope -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor`."""

    kind: ClassVar[str] = "linear"
    factor: float

    def __post_init__(self) -> None:
        positive(factor=self.factor)


@dataclass(frozen=True)
class Dynamic:
    """NTK scaling with the base for the whole of max_position_embeddings, the same at every step (see ops/rope.py)."""

    kind: ClassVar[str] = "dynamic"
    factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        positive(factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)


@dataclass(frozen=True)
class NtkAlpha:
    """NTK scaling whose base grows by a given `alpha`, whatever the length."""

    kind: ClassVar[str] = "ntk_alpha"
    alpha: float

    def __post_init__(self) -> None:
        positive(alpha=self.alpha)


@dataclass(frozen=True)
class Ntk:
    """NTK scaling by a fixed `factor`; with `mixed_b`, each channel pair by a factor of its own up to that one."""

    kind: ClassVar[str] = "ntk"
    factor: float
    mixed_b: float | None = None

    def __post_init__(self) -> None:
        positive(factor=self.factor, mixed_b=self.mixed_b)
        if self.mixed_b is not None and self.mixed_b > 10:
            raise ConfigError(f"mixed_b is {self.mixed_b}; expected at most 10 (it is an exponent of channel numbers)")


@dataclass(frozen=True)
class Yarn:
    """Fast channels as they are, slow ones interpolated, and cosines and sines multiplied by an attention factor."""

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        positive(factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)
        positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow, attention_factor=self.attention_factor)
        # 0 says "not set" where both are read, as in transformers and vLLM.
        _mscales(self.mscale, self.mscale_all_dim)


@dataclass(frozen=True)
class DeepseekYarn:
    """Yarn with DeepSeek's attention factor, the quotient of two."""

    kind: ClassVar[str] = "deepseek_yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        positive(factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)
        positive(beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        _mscales(self.mscale, self.mscale_all_dim)


def _mscales(mscale: float | None, mscale_all_dim: float | None) -> None:
    for name, value in (("mscale", mscale), ("mscale_all_dim", mscale_all_dim)):
        if value is not None and not 0 <= value <= 1000:
            raise ConfigError(f"{name} is {value}; expected a number from 0 to 1000")


@dataclass(frozen=True)
class Llama3:
    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        positive(factor=self.factor, original_max_position_embeddings=self.original_max_position_embeddings)
        positive(low_freq_factor=self.low_freq_factor, high_freq_factor=self.high_freq_factor)


@dataclass(frozen=True)
class LongRope:
    """A factor for each channel pair: `long_factor` for models longer than the original length, `short_factor` else.

    `use` chooses one of the lists whatever the length. `short_mscale` and `long_mscale` multiply cosines and sines in
    place of the factor that follows from the two lengths.
    """

    kind: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    short_mscale: float | None = None
    long_mscale: float | None = None
    use: Literal["auto", "short", "long"] = "auto"

    def __post_init__(self) -> None:
        if self.original_max_position_embeddings < 2:
            raise ConfigError(
                f"original_max_position_embeddings is {self.original_max_position_embeddings}; expected at least 2, since "
                "its logarithm divides"
            )
        positive(short_mscale=self.short_mscale, long_mscale=self.long_mscale)
        for name in ("short_factor", "long_factor"):
            for i, value in enumerate(getattr(self, name)):
                positive(**{f"{name}[{i}]": value})


Scaling = Linear | Dynamic | NtkAlpha | Ntk | Yarn | DeepseekYarn | Llama3 | LongRope


# ---- kinds of positions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `style` is how channels pair up: "half" (i with i + d/2) or "interleaved" (2i with 2i + 1)."""

    kind: ClassVar[str] = "rope"
    theta: float = 10000.0
    style: Literal["half", "interleaved"] = "half"
    partial_rotary_factor: float = 1.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        positive(theta=self.theta)
        if not 0 < self.partial_rotary_factor <= 1:
            raise ConfigError(f"partial_rotary_factor is {self.partial_rotary_factor}; expected a number in (0, 1]")
        if isinstance(self.scaling, Yarn | DeepseekYarn) and self.theta == 1:
            raise ConfigError(
                f"theta is 1.0; expected another number, since scaling of kind {self.scaling.kind} divides by its logarithm"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of each head that turn; the rest pass through untouched."""
        return int(head_dim * self.partial_rotary_factor)

    def check_head(self, head_dim: int) -> None:
        """Raises:
        ConfigError: this does not fit heads of that size.
        """
        rotary = self.rotary_dim(head_dim)
        if rotary % 2 or not rotary:
            raise ConfigError(
                f"position.partial_rotary_factor {self.partial_rotary_factor} of head_dim {head_dim} "
                f"is {rotary} channels; expected an even number above 0, since channels turn in pairs"
            )
        if rotary == 2 and isinstance(self.scaling, Dynamic | NtkAlpha):
            raise ConfigError(
                f"position.scaling of kind {self.scaling.kind} is given 2 rotary channels; expected at least 4, since its "
                "base grows with the power channels / (channels - 2)"
            )
        if isinstance(self.scaling, LongRope):
            for name in ("short_factor", "long_factor"):
                found = len(getattr(self.scaling, name))
                if found != rotary // 2:
                    raise ConfigError(
                        f"position.scaling.{name} has {found} entries; expected {rotary // 2}, one per pair of the {rotary} "
                        "rotary channels"
                    )

    def check_length(self, max_positions: int, head_dim: int) -> None:
        """Raises:
        ConfigError: the table of a model of that length is too large, or the length was stretched twice.
        """
        if self.rotary_dim(head_dim) * max_positions > MAX_TABLE:
            raise ConfigError(
                f"max_position_embeddings is {max_positions} and head_dim {head_dim}; expected a rotary table of at most "
                f"{MAX_TABLE} numbers"
            )
        if isinstance(self.scaling, Yarn | DeepseekYarn):
            original, factor = self.scaling.original_max_position_embeddings, self.scaling.factor
            # Lengths are whole numbers, factors rounded ones.
            if max_positions > math.ceil(original * factor * (1 + 1e-6)):
                raise ConfigError(
                    f"max_position_embeddings is {max_positions}, but position.scaling of kind {self.scaling.kind} stretches "
                    f"{original} positions by {factor:g}, to {original * factor:g}; expected at most that. Was the factor "
                    "applied twice, or is original_max_position_embeddings another length?"
                )


@dataclass(frozen=True)
class Xpos:
    """Rotary positions whose products also fall with distance, each channel pair at a rate of its own."""

    kind: ClassVar[str] = "xpos"
    theta: float = 10000.0
    style: Literal["half", "interleaved"] = "interleaved"
    gamma: float = 0.4
    scale_base: float = 512.0

    # Keys that share an anchor at most (see ops/xpos.py), and the power of two that a channel may fall by among them.
    longest_tile: ClassVar[int] = 256
    _most: ClassVar[int] = 60

    def __post_init__(self) -> None:
        positive(theta=self.theta, gamma=self.gamma, scale_base=self.scale_base)
        fall = math.log2((1 + self.gamma) / self.gamma) * self.longest_tile / self.scale_base
        if fall > self._most:
            raise ConfigError(
                f"gamma is {self.gamma} and scale_base {self.scale_base}, so that a channel falls by 2 ** {fall:.0f} within "
                f"{self.longest_tile} tokens; expected at most 2 ** {self._most}. Published are gamma 0.4 and scale_base 512"
            )

    @property
    def rope(self) -> Rope:
        """The turning alone."""
        return Rope(self.theta, self.style)

    def check_head(self, head_dim: int) -> None:
        """Raises:
        ConfigError: heads of that size have no pairs of channels.
        """
        if head_dim % 2:
            raise ConfigError(
                f"position is xpos and head_dim {head_dim}; expected an even head_dim, since channels turn in pairs"
            )


@dataclass(frozen=True)
class Alibi:
    """A penalty on distance, or on its square root. Without `slopes`, the published ones for the number of heads."""

    kind: ClassVar[str] = "alibi"
    slopes: tuple[float, ...] | None = None
    distance: Literal["linear", "sqrt"] = "linear"


@dataclass(frozen=True)
class Sandwich:
    """A penalty on distance from the products of sinusoidal positions of `dim` channels (null: head_dim)."""

    kind: ClassVar[str] = "sandwich"
    dim: int | None = None

    def __post_init__(self) -> None:
        positive(dim=self.dim)
        at_most(2**16, dim=self.dim)
        if self.dim is not None and self.dim % 2:
            raise ConfigError(f"dim is {self.dim}; expected an even number, since sinusoidal positions come in pairs")


@dataclass(frozen=True)
class T5:
    """A learned number per head and range of distances; `shared`: one table for all layers that say so."""

    kind: ClassVar[str] = "t5"
    num_buckets: int = 32
    max_distance: int = 128
    shared: bool = False

    def __post_init__(self) -> None:
        at_most(2**16, num_buckets=self.num_buckets)
        at_most(MAX_SIZE, max_distance=self.max_distance)
        if self.num_buckets < 2:
            raise ConfigError(f"num_buckets is {self.num_buckets}; expected at least 2")
        if self.max_distance <= self.num_buckets // 2:
            raise ConfigError(
                f"max_distance is {self.max_distance} and num_buckets {self.num_buckets}; expected a distance above "
                f"{self.num_buckets // 2}, since the first half of the buckets holds one distance each"
            )


@dataclass(frozen=True)
class Kerple:
    """-r1 * log(1 + r2 * distance), r1 and r2 per head: listed here, or learned and in the checkpoint."""

    kind: ClassVar[str] = "kerple"
    r1: tuple[float, ...] | None = None
    r2: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.r1 is None) != (self.r2 is None):
            there, missing = ("r1", "r2") if self.r2 is None else ("r2", "r1")
            raise ConfigError(
                f"{missing} is missing and {there} is there; expected both, or none where the checkpoint has them"
            )
        for name in ("r1", "r2"):
            for i, value in enumerate(getattr(self, name) or ()):
                positive(**{f"{name}[{i}]": value})


@dataclass(frozen=True)
class NoPosition:
    kind: ClassVar[str] = "none"


# Of a mixer that says nothing about positions.
ROPE = Rope()

Position = Rope | Xpos | Alibi | Sandwich | T5 | Kerple | NoPosition


def rotation(position: Position) -> Rope | None:
    """How queries and keys turn, or None where they do not."""
    return position.rope if isinstance(position, Xpos) else position if isinstance(position, Rope) else None


def check_position(position: Position, num_heads: int, head_dim: int) -> None:
    """Raises:
    ConfigError: positions that do not fit the heads of their layer.
    """
    if isinstance(position, Rope | Xpos):
        position.check_head(head_dim)
    lists = {"slopes": getattr(position, "slopes", None), "r1": getattr(position, "r1", None)}
    lists["r2"] = getattr(position, "r2", None)
    for name, values in lists.items():
        if values is not None and len(values) != num_heads:
            raise ConfigError(f"position.{name} has {len(values)} entries; expected num_heads = {num_heads}")
    if isinstance(position, Sandwich) and position.dim is None and head_dim % 2:
        raise ConfigError(
            f"position is sandwich without dim and head_dim is {head_dim}; expected an even number of channels"
        )
    if isinstance(position, T5) and num_heads * (position.max_distance + 1) > MAX_TABLE // 8:
        raise ConfigError(
            f"position.max_distance is {position.max_distance} and num_heads {num_heads}; expected a table of at most "
            f"{MAX_TABLE // 8} numbers"
        )


def check_length(position: Position, head_dim: int, max_positions: int) -> None:
    """Raises:
    ConfigError: positions that do not fit the length of the model.
    """
    turning = rotation(position)
    if turning is not None:
        turning.check_length(max_positions, head_dim)
    if isinstance(position, Sandwich) and (position.dim or head_dim) * max_positions > MAX_TABLE:
        raise ConfigError(
            f"max_position_embeddings is {max_positions} and sandwich has {position.dim or head_dim} channels; expected a "
            f"product of at most {MAX_TABLE}"
        )


def learned(position: Position, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of the parameters that a layer has for its positions; a shared table is the model's."""
    if isinstance(position, T5) and not position.shared:
        return {"t5_bias": (position.num_buckets, num_heads)}
    if isinstance(position, Kerple) and position.r1 is None:
        return {"kerple_r1": (num_heads,), "kerple_r2": (num_heads,)}
    return {}
