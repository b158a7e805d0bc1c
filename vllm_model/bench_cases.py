"""What `tiers bench` times of the operators: cases, their inputs, their exact results, and what they need of a device.

Legend: T query tokens, S tokens in the cache, H query heads, KV key/value heads, D head size, B blocks in the cache, N
tokens per block, M model width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from tiers.reference.config import Attention, Dense, Gate, Layer, ModelConfig, Swiglu, TopK, Window
from tiers.reference.heads import HeadLayout
from tiers.reference.ops import attention as reference
from tiers.reference.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_gate import beside, knowledge_gate
from tiers.reference.ops.paged_attention import Batch
from tiers.reference.positions import T5, NoPosition, Position, Rope
from tiers.reference.testing.inputs import position_options
from tiers.vllm_model import compat, dispatch
from tiers.vllm_model.bench_report import KernelResult
from tiers.vllm_model.plan import Tier

# Where two keys score as near to each other as this, rounding decides which of them top-k keeps; both are right, and the
# head of that row is not compared.
MARGIN = 2e-5

# How many rows of a gate, and query tokens and requests of attention, have their exact result computed.
CHECKED_ROWS, CHECKED_TOKENS, CHECKED_REQUESTS = 64, 4, 4

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Limits:
    """What a device does at best, measured: bytes read per second, bytes copied per second (read plus written), and
    operations per second of a large matrix product."""

    read: float
    copy: float
    operations: float

    def time(self, moved: float, operations: float) -> tuple[float, str]:
        """The least microseconds for so many bytes and operations, and which of the two they are due to."""
        by_bytes, by_operations = moved / max(self.read, self.copy), operations / self.operations
        return max(by_bytes, by_operations) * 1e6, "bytes" if by_bytes >= by_operations else "operations"


@dataclass(frozen=True)
class Machine:
    device: str
    dtype: torch.dtype
    limits: Limits

    @property
    def page(self) -> int:
        """Tokens per block of the cache: vLLM's default."""
        return 16 if self.device == "cuda" else 128

    @property
    def where(self) -> dispatch.Where:
        return dispatch.Where(self.device, self.page, str(self.dtype).removeprefix("torch."))

    def randn(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)


@dataclass
class Exact:
    """What some rows of a result should be.

    Attributes:
        rows: which rows of the result of a call these are.
        best: the reference in float64.
        eager: the reference in the dtype of the case.
        compared: which elements of them count.
    """

    rows: Tensor
    best: Tensor
    eager: Tensor
    compared: Tensor


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass
class PagedInputs:
    query_THD: Tensor
    cache_BKNC: Tensor
    batch: Batch


@dataclass(frozen=True)
class AttentionCase:
    """`tokens` query tokens at the end of each of `batch` requests that have `context` tokens.

    Attributes:
        mixer: as a layer runs inside vLLM: contiguous heads, and positions only where they are part of attention. What is
            learned of them is random.
    """

    mixer: Attention
    batch: int
    context: int
    tokens: int

    def choices(self, machine: Machine) -> Iterator[tuple[Tier | None, str | None]]:
        """Each tier, with the reason where it is not timed."""
        for tier in Tier:
            reason = dispatch.unsupported("attention", tier, Layer(self.mixer, Swiglu(1)), machine.where)
            if reason is None and dispatch.is_native(self.mixer, tier, machine.where):
                reason = "vLLM's own attention; on CUDA that is FlashAttention, timed as dense attention"
            yield tier, reason

    def result(self, name: str, machine: Machine) -> KernelResult:
        """Where the outcome of one implementation goes."""
        limit, bound = machine.limits.time(*self.needed(machine.dtype.itemsize))
        phase = "decode" if self.tokens == 1 else "prefill"
        return KernelResult(
            "attention", phase, self.what, self.batch, self.context, self.tokens, name, limit=limit, bound=bound
        )

    @property
    def what(self) -> str:
        """The pattern in words, as in the table of a plan."""
        heads = f", {self.mixer.num_heads} heads / {self.mixer.num_kv_heads} kv"
        return dispatch.describe(Layer(self.mixer, Swiglu(1)), "attention").removesuffix(heads).removesuffix(", none")

    def inputs(self, machine: Machine) -> PagedInputs:
        """Random queries, and requests whose pages are scattered over a cache that they fill."""
        mixer, device = self.mixer, machine.device
        page = machine.page
        pages = -(-self.context // page)
        blocks = self.batch * pages
        width = 2 * mixer.head_dim
        # The cache, and, for dense attention on the CPU, its keys and values once more.
        require(3 * blocks * page * mixer.num_kv_heads * width * machine.dtype.itemsize, device)
        if device == "cuda":  # vLLM's layouts: here tokens before heads, on the CPU heads before tokens
            cache = machine.randn(blocks, page, mixer.num_kv_heads, width, seed=0).transpose(1, 2)
        else:
            cache = machine.randn(blocks, mixer.num_kv_heads, page, width, seed=0)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
        batch = Batch(
            order.view(self.batch, pages),
            torch.full((self.batch,), self.context, dtype=torch.int32, device=device),
            torch.arange(self.batch + 1, dtype=torch.int32, device=device) * self.tokens,
            self.tokens,
            self.context,
        )
        batch.host  # noqa: B018  read now, so that a call waits for nothing and can be captured
        return PagedInputs(
            machine.randn(self.batch * self.tokens, mixer.num_heads, mixer.head_dim, seed=1), cache, batch
        )

    def call(self, tier: Tier | None, inputs: PagedInputs, machine: Machine) -> Call:
        assert tier is not None
        function = dispatch.function("paged_attention", tier)
        return partial(function, inputs.query_THD, inputs.cache_BKNC, inputs.batch, **self._options(machine))

    def _options(self, machine: Machine) -> dict[str, Any]:
        mixer = self.mixer
        return {
            "scale": self.mixer.softmax_scale,
            "pattern": self.mixer.pattern,
            **position_options(mixer.position, mixer.num_heads, mixer.head_dim, self.context, machine.device),
            "softcap": self.mixer.softcap,
        }

    def exact(self, inputs: PagedInputs, machine: Machine) -> Exact:
        """Of the first and last tokens and requests and some between; of those, the heads with a clear choice of keys."""
        size = self.mixer.head_dim
        rows, best, eager, clear = [], [], [], []
        for request in some(self.batch, CHECKED_REQUESTS):
            blocks = inputs.batch.block_table_RP[request]
            tokens = rearrange(inputs.cache_BKNC[blocks], "p kv n c -> (p n) kv c")
            for token in some(self.tokens, CHECKED_TOKENS):
                row, end = request * self.tokens + token, self.context - self.tokens + token + 1
                operands = (
                    inputs.query_THD[row : row + 1], tokens[:end, :, :size], tokens[:end, :, size:]
                )  # fmt: skip
                with watched_gaps() as gaps:
                    best.append(reference.attention(*(x.double() for x in operands), **self._options(machine)))
                eager.append(reference.attention(*operands, **self._options(machine)))
                decided = gaps[0].reshape(1, -1, 1) > MARGIN if gaps else torch.ones_like(best[-1], dtype=torch.bool)
                clear.append(decided.expand_as(best[-1]))
                rows.append(row)
        return Exact(torch.tensor(rows, device=machine.device), torch.cat(best), torch.cat(eager), torch.cat(clear))

    def needed(self, itemsize: int) -> tuple[float, float]:
        """The least bytes that have to move and the operations that have to be done.

        Every key that is scored and every value that some row keeps is read once. How many different values the rows of
        top-k keep depends on the inputs; for independent choices, as with random inputs, it is as below.
        """
        mixer, pattern = self.mixer, self.mixer.pattern
        keys = values = float(self.context)
        scored = kept = self.tokens * (self.context - self.tokens) + self.tokens * (self.tokens + 1) / 2
        if isinstance(pattern, Window):
            kept = scored = min(scored, self.tokens * (pattern.window + pattern.sink))
            keys = values = min(keys, pattern.window + self.tokens - 1 + pattern.sink)
        elif isinstance(pattern, TopK):
            per_row = min(self.context, pattern.k + pattern.sink + pattern.window)
            kept = min(scored, self.tokens * per_row)
            choosers = self.tokens * (mixer.num_heads // mixer.num_kv_heads if pattern.share == "head" else 1)
            values = self.context * (1 - (1 - per_row / self.context) ** choosers)
        cached = mixer.num_kv_heads * mixer.head_dim * (keys + values)
        queries_and_results = 2 * self.tokens * mixer.num_heads * mixer.head_dim
        operations = 2 * mixer.num_heads * mixer.head_dim * (scored + kept)
        return self.batch * (cached + queries_and_results) * itemsize, self.batch * operations


@dataclass(frozen=True)
class DenseCase(AttentionCase):
    """Dense attention by others, on the same inputs: vLLM's FlashAttention on CUDA, else torch's own."""

    def choices(self, machine: Machine) -> Iterator[tuple[Tier | None, str | None]]:
        yield None, None

    def call(self, tier: Tier | None, inputs: PagedInputs, machine: Machine) -> Call:
        if uses_flash_attention(machine):
            return compat.flash_attention(inputs.query_THD, inputs.cache_BKNC, inputs.batch, self.mixer.softmax_scale)
        size = self.mixer.head_dim
        # Gathered beforehand: torch has no paged attention, and its time shall be that of the attention alone.
        tokens = rearrange(inputs.cache_BKNC[inputs.batch.block_table_RP], "r p kv n c -> r kv (p n) c")
        tokens = tokens[:, :, : self.context]
        key, value = tokens[..., :size].contiguous(), tokens[..., size:].contiguous()
        query = rearrange(inputs.query_THD, "(r t) h d -> r h t d", r=self.batch)
        mask = None
        if self.tokens > 1:
            positions = torch.arange(self.context, device=key.device)
            mask = positions <= positions[-self.tokens :, None]

        def attend() -> Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.mixer.softmax_scale, enable_gqa=True
            )
            return rearrange(out, "r h t d -> (r t) h d")

        return attend


def uses_flash_attention(machine: Machine) -> bool:
    return machine.device == "cuda" and machine.dtype != torch.float32


def dense_name(machine: Machine) -> str:
    """What dense attention is compared with here."""
    return compat.flash_attention_name() if uses_flash_attention(machine) else "torch SDPA"


@contextmanager
def watched_gaps() -> Iterator[list[Tensor]]:
    """Watch the reference choose keys: for every row, how far the lowest key that was chosen lies above the highest that
    was not. Empty where there was nothing to choose."""
    original = reference.kept
    found: list[Tensor] = []

    def watching(scores: Tensor, distance: Tensor, pattern: Any, index: Tensor | None = None) -> Tensor:
        keep = original(scores, distance, pattern, index)
        if isinstance(pattern, TopK) and distance.shape[1] > pattern.k:
            ranked = scores if pattern.share == "head" else reference.group_max(scores, index)
            positions = torch.arange(distance.shape[1], device=distance.device)
            chosen = keep & ~((distance < pattern.window) | (positions < pattern.sink))
            lowest = ranked.masked_fill(~chosen, float("inf")).amin(dim=-1)
            highest = ranked.masked_fill(keep | (distance < 0), float("-inf")).amax(dim=-1)
            found.append((lowest - highest).expand(scores.shape[:-1]))
        return keep

    reference.kept = watching  # type: ignore[assignment]
    try:
        yield found
    finally:
        reference.kept = original


# ---- the knowledge gate ---------------------------------------------------------------------------------------------


@dataclass
class GateInputs:
    """The hidden state, W and b, and K and V of a bank (with what is folded beside V, if it is) or the rows of a table."""

    hidden_TM: Tensor
    weight_M2M: Tensor
    bias_M: Tensor | None
    knowledge: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class GateCase:
    """The lookup in the bank, if the gate has one, and the mixing; a table lookup is vLLM's and not part of it."""

    gate: Gate
    width: int
    tokens: int

    def choices(self, machine: Machine) -> Iterator[tuple[Tier | None, str | None]]:
        layer = Layer(Attention(1, 1, 2), Swiglu(1), self.gate)
        for tier in Tier:
            yield tier, dispatch.unsupported("gate", tier, layer, machine.where)

    def result(self, name: str, machine: Machine) -> KernelResult:
        limit, bound = machine.limits.time(*self.needed(machine.dtype.itemsize))
        return KernelResult("gate", "gate", self.what, 0, 0, self.tokens, name, limit=limit, bound=bound)

    @property
    def what(self) -> str:
        return dispatch.describe(Layer(Attention(1, 1, 2), Swiglu(1), self.gate), "gate")

    def inputs(self, machine: Machine) -> GateInputs:
        require((2 * self.width**2 + 4 * self.tokens * self.width) * machine.dtype.itemsize, machine.device)
        rows = [self.gate.slots] * 2 if self.gate.slots else [self.tokens]
        return GateInputs(
            machine.randn(self.tokens, self.width, seed=0),
            machine.randn(self.width, 2 * self.width, seed=1) * (2 * self.width) ** -0.5,
            machine.randn(self.width, seed=2) if self.gate.bias else None,
            [machine.randn(count, self.width, seed=3 + i) for i, count in enumerate(rows)],
        )

    def call(self, tier: Tier | None, inputs: GateInputs, machine: Machine) -> Call:
        assert tier is not None
        bank, mix = dispatch.function("knowledge_bank", tier), dispatch.function("knowledge_gate", tier)
        if self.gate.source == "bank" and tier is not Tier.REFERENCE:  # as it is served
            keys, values = inputs.knowledge
            inputs = replace(inputs, knowledge=[keys, beside(values, inputs.weight_M2M)])
        return partial(self._apply, bank, mix, inputs)

    def _apply(self, bank: Callable[..., Tensor], mix: Callable[..., Tensor], inputs: GateInputs) -> Tensor:
        hidden = inputs.hidden_TM
        folded: list[Tensor] = []
        if self.gate.source == "bank":
            scale = self.gate.scale if self.gate.scale is not None else self.width**-0.5
            knowledge, *folded = bank(hidden, *inputs.knowledge, scale).split(self.width, dim=1)
        else:
            (knowledge,) = inputs.knowledge
        return mix(hidden, knowledge, inputs.weight_M2M, inputs.bias_M, self.gate.mode, *folded)

    def exact(self, inputs: GateInputs, machine: Machine) -> Exact:
        rows = torch.tensor(some(self.tokens, CHECKED_ROWS), device=machine.device)
        results = []
        for dtype in (torch.float64, machine.dtype):
            knowledge = inputs.knowledge if self.gate.source == "bank" else [inputs.knowledge[0][rows]]
            part = GateInputs(
                inputs.hidden_TM[rows].to(dtype),
                inputs.weight_M2M.to(dtype),
                None if inputs.bias_M is None else inputs.bias_M.to(dtype),
                [tensor.to(dtype) for tensor in knowledge],
            )
            results.append(self._apply(knowledge_bank, knowledge_gate, part))
        best, eager = results
        return Exact(rows, best, eager, torch.ones_like(best, dtype=torch.bool))

    def needed(self, itemsize: int) -> tuple[float, float]:
        """As of an AttentionCase."""
        slots = self.gate.slots or 0
        # With a bank: half of W, keys, and values with their products. Else the whole of W.
        halves = 1 if slots else 2
        tables = halves * self.width**2 + 3 * slots * self.width
        operations = 2 * self.tokens * self.width * (halves * self.width + 3 * slots)
        return (3 * self.tokens * self.width + tables) * itemsize, operations


Case = AttentionCase | GateCase


# ---- which cases ----------------------------------------------------------------------------------------------------


def standard_mixers(ks: Sequence[int], shares: Sequence[str]) -> list[Attention]:
    """32 query heads, 8 key/value heads, head size 128: top-k, a window of 1024 tokens with 16 sinks, dense."""
    patterns: list[reference.Pattern] = [TopK(k, share=share) for share in shares for k in ks]  # type: ignore[arg-type]
    patterns += [Window(1024, 16), Dense()]
    return [Attention(32, 8, 128, pattern=pattern, position=NoPosition()) for pattern in patterns]


STANDARD_GATES = (Gate("sigmoid", "bank", slots=64), Gate("mix", "token"))


def model_mixers(config: ModelConfig) -> list[Attention]:
    """The kinds of attention in a model, as its layers run inside vLLM."""
    found = []
    for mixer in config.mixers:
        layout = HeadLayout.of(mixer.heads, mixer.num_kv_heads)
        position: Position = NoPosition() if isinstance(mixer.position, Rope) else mixer.position
        for name in ("slopes", "r1", "r2"):  # one per head
            if (values := getattr(position, name, None)) is not None:
                arranged = layout.arrange(torch.tensor(values), 1, dim=0, copy=True)
                changes: dict[str, Any] = {name: tuple(arranged.tolist())}
                position = replace(position, **changes)
        if isinstance(position, T5):
            position = replace(position, shared=False)
        mixer = replace(mixer, num_heads=layout.num_heads, head_map="contiguous", position=position)
        found.append(replace(mixer, qkv_bias=False, o_bias=False, qk_norm="none"))
    return list(dict.fromkeys(found))


def attention_groups(
    mixers: Sequence[Attention], batches: Sequence[int], contexts: Sequence[int], chunk: int
) -> list[list[Case]]:
    """Decode steps of every batch and context, and the last `chunk` tokens of a prompt of every context.

    Returns:
        Cases on one shape together, since they share inputs; dense attention of others is the first of each.
    """
    sizes = [(batch, context, 1) for context in contexts for batch in batches]
    sizes += [(1, context, min(context, chunk)) for context in contexts]
    groups: list[list[Case]] = []
    for shape in dict.fromkeys((m.num_heads, m.num_kv_heads, m.head_dim) for m in mixers):
        same = [m for m in mixers if (m.num_heads, m.num_kv_heads, m.head_dim) == shape]
        plain = replace(same[0], pattern=Dense(), position=NoPosition(), softcap=None)
        groups += [[DenseCase(plain, *size), *(AttentionCase(m, *size) for m in same)] for size in sizes]
    return groups


def some(count: int, at_most: int) -> list[int]:
    """Indices spread over `count`, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (at_most - 1)) for i in range(at_most)})


def require(wanted: int, device: str) -> None:
    """Refuse what does not fit on the CPU, where taking too much memory ends the process instead of raising something.

    Raises:
        MemoryError: says how many bytes are wanted and how many are free.
    """
    if device != "cpu":
        return
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if wanted > 0.8 * free:
        raise MemoryError(f"needs {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
