"""The attention backend: what vLLM's runners call, on top of the operators of the tiers.

Legend: T packed tokens (padding rows at the end), H query heads, KV key/value heads, D head size, B blocks in the cache,
N tokens per block.

The cache of a layer is a view [B, KV, N, 2 * D] with keys in the first D channels; its strides depend on the layout that
vLLM chose for the whole model, so it is only ever indexed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from tiers.reference.errors import ServingError
from tiers.reference.ops.attention import Pattern
from tiers.reference.ops.bias import Bias
from tiers.reference.ops.paged_attention import Batch
from tiers.vllm_model import compat, dispatch, metrics, shadow
from tiers.vllm_model.compat import BACKEND_NAME
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.ops import workspace
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import self_check

logger = init_logger("vllm.tiers")

workspace.provide = compat.scratch


@dataclass
class TiersMetadata(Batch, AttentionMetadata):
    """What one step needs to know of its batch.

    Attributes:
        num_tokens: query tokens; rows beyond are padding.
        lengths_on_host, starts_on_host: what vLLM knows of lengths (at least as large as they are) and starts without
            asking the device.
    """

    num_tokens: int = 0
    lengths_on_host: Tensor | None = None
    starts_on_host: Tensor | None = None

    @property
    def bounds(self) -> tuple[list[int], list[int]]:
        """See `Batch.bounds`."""
        if self.lengths_on_host is None or self.starts_on_host is None:
            return self.host
        return self.lengths_on_host.tolist(), self.starts_on_host.tolist()


class TiersMetadataBuilder(AttentionMetadataBuilder[TiersMetadata]):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Full graphs of decode steps if every layer of ours can be captured; the reference asks for lengths on the host,
        and the compiled tier for the number of pages.

        The answer holds for as long as the engine lives, so kernels that do not even compile have to be known now: each
        layer is tried on a small cache.
        """
        # Layers that differ in heads share one specification of several; page and dtype are the same in all.
        spec = next(iter(getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values()))
        tiers = set()
        for layer in vllm_config.compilation_config.static_forward_context.values():
            if isinstance(impl := getattr(layer, "impl", None), TiersAttentionImpl):
                impl.prove_early(spec.block_size, spec.dtype)
                tiers.add(impl.tier)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if tiers <= {Tier.FAST} else AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TiersMetadata:
        common = common_attn_metadata
        return TiersMetadata(
            block_table_RP=common.block_table_tensor,
            lengths_R=common.seq_lens,
            starts_R1=common.query_start_loc,
            max_query=common.max_query_len,
            max_length=common.max_seq_len,
            num_tokens=common.num_actual_tokens,
            lengths_on_host=common.seq_lens_cpu_upper_bound,
            starts_on_host=common.query_start_loc_cpu,
        )


class TiersAttentionImpl(AttentionImpl):
    """One layer's attention on the tier that was chosen for it.

    Raises:
        ServingError: an option of the engine that no tier computes. vLLM does not validate a backend that a model
            passes explicitly, so this is the only place that can refuse.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        pattern: Pattern,
        choice: Choice,
        longest: int,
        most_tokens: int,
        bias: Callable[[], Bias | None] = lambda: None,
        decay_D: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in TiersAttentionBackend.supported_kv_cache_dtypes:
            raise ServingError(f"--kv-cache-dtype is {kv_cache_dtype}; expected auto, float16 or bfloat16")
        if alibi_slopes is not None:
            raise ServingError(f"alibi_slopes are {alibi_slopes}; expected them as a bias, of which they are one kind")
        if attn_type != AttentionType.DECODER or sliding_window is not None or kv_sharing_target_layer_name is not None:
            raise ServingError(
                f"attention type {attn_type}, sliding window {sliding_window}, shared cache {kv_sharing_target_layer_name}: "
                "expected decoder attention with the pattern of config.json and a cache of its own"
            )
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.softcap = float(scale), logits_soft_cap
        self.kv_cache_dtype = kv_cache_dtype
        self.pattern, self.choice, self.tier = pattern, choice, choice.tier
        # Made when the weights are there: it may be learned.
        self.bias: Bias | None = None
        self._make_bias, self.decay_D = bias, decay_D
        self.longest, self.most_tokens = longest, most_tokens
        self.paged_attention = dispatch.function("paged_attention", self.tier)
        # The reference needs no proof; any other tier is compared with it, on the cache that it will work on.
        self.proved = self.tier is Tier.REFERENCE
        self.shadow = shadow.join(self)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TiersMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill `output` [T, H, D] from `query` [T, H, D] and the cache, which holds this step's keys already."""
        if output_scale is not None or output_block_scale is not None:
            raise ServingError("fused output quantization of attention is not supported; turn its fusion pass off")
        if attn_metadata is None:  # the run that measures memory; there is no cache yet
            if module := self._kernels():
                # What the tier will hold beside its arguments has to be part of what is measured, and has to have its
                # place before a graph refers to it.
                size = module.workspace_bytes(
                    self.pattern, self.num_heads, self.num_kv_heads, self.head_size, self.most_tokens, self.longest
                )
                compat.scratch(size, query.device)
            return output.fill_(0)
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if not self.proved and not capturing:
            self.prove(kv_cache)
        if capturing and self.tier is not Tier.FAST:
            raise ServingError(
                f"layer {self.choice.layer} fell back to tier {self.tier.value}, which cannot be part of the full CUDA "
                f"graphs that this start chose; start again with --tiers 'auto,{self.choice.layer}.attention={self.tier.value}'"
            )
        metrics.count("attention", self.tier.value)
        tokens = attn_metadata.num_tokens
        options = self.options()
        if module := self._kernels():
            module.fill(query[:tokens], kv_cache, attn_metadata, output[:tokens], **options)
        else:
            output[:tokens] = self.paged_attention(query[:tokens], kv_cache, attn_metadata, **options)
        if tokens < len(output):
            output[tokens:] = 0
        if self.shadow is not None:
            self.shadow.attention(self, query[:tokens], kv_cache, attn_metadata, output[:tokens], options)
        return output

    def options(self) -> dict[str, Any]:
        """What `paged_attention` is called with beside tensors of the step."""
        return {
            "scale": self.scale, "pattern": self.pattern, "bias": self.bias, "decay_D": self.decay_D,
            "softcap": self.softcap,
        }  # fmt: skip

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the bias from the layer's parameters; into the memory of the one before, which graphs may refer to."""
        made = self._make_bias()
        if self.bias is None or made is None:
            self.bias = made
        else:
            self.bias.fill(made)

    def prove_early(self, block_size: int, dtype: torch.dtype) -> None:
        """As `prove`, on a cache of a few blocks, where there are kernels of ours and a device for them."""
        if self._kernels() and torch.cuda.is_available():
            self.prove(torch.zeros(4, self.num_kv_heads, block_size, 2 * self.head_size, dtype=dtype, device="cuda"))

    @torch.inference_mode()
    def prove(self, kv_cache: Tensor) -> None:
        """Compare the tier with the reference on this layer's cache; on failure take the next slower one, or stop.

        Raises:
            ServingError: the tier failed and the plan asked for it by name.
        """
        self.proved = True
        options = self.options()
        while self.tier is not Tier.REFERENCE:
            failure = self_check(
                self.paged_attention, kv_cache, self.num_heads, self.longest, self.most_tokens, **options
            )
            if failure is None:
                break
            where = f"layer {self.choice.layer}: attention on tier {self.tier.value} {failure}"
            if self.choice.named:
                raise ServingError(
                    f"{where}. Use another tier for it: --tiers 'auto,{self.choice.layer}.attention=reference'"
                )
            self.tier = self.choice.slower(self.tier)
            logger.warning("%s; this layer is served by tier %s", where, self.tier.value)
            self.paged_attention = dispatch.function("paged_attention", self.tier)
        if module := self._kernels():
            module.warm_up(kv_cache, self.num_heads, self.most_tokens, self.longest, **options)

    def _kernels(self) -> Any:
        """The module of the fast tier, which knows what its kernels need; None on another tier."""
        return dispatch.module("paged_attention", self.tier) if self.tier is Tier.FAST else None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values [T, KV, D] to their slots (block * N + offset); slot -1 is a padding row."""
        if self.tier is Tier.FAST and kv_cache.is_cuda:
            from tiers.vllm_model.ops.store_tokens import store_tokens

            store_tokens(key, value, kv_cache, slot_mapping)
            return
        tokens = slot_mapping.shape[0]
        # Padding goes to the first slot of block 0, the null block, which no request reads; dropping those rows instead
        # would make the host wait for the device.
        slots = slot_mapping.clamp(min=0)
        page = kv_cache.shape[2]
        kv_cache[slots // page, :, slots % page] = torch.cat((key[:tokens], value[:tokens]), dim=-1).to(kv_cache.dtype)


class TiersAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[TiersAttentionImpl]:
        return TiersAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TiersMetadataBuilder]:
        return TiersMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]
