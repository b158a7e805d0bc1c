"""The model inside vLLM: the same layers as tiers.reference.model, from vLLM's parallel building blocks.

Legend: T packed tokens, M model width, H query heads of this rank, KV key/value heads of this rank, D head size.
"""

import functools
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import MixtureOfExperts, SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper, make_layers, maybe_prefix
from vllm.model_executor.utils import set_weight_attrs
from vllm.sequence import IntermediateTensors

from tiers.reference import config as c
from tiers.reference.heads import HeadLayout
from tiers.reference.load import mapped
from tiers.reference.ops.bias import Bias, bias_of
from tiers.reference.ops.rope import rope_table
from tiers.reference.ops.xpos import xpos_decay
from tiers.reference.positions import learned, rotation
from tiers.vllm_model import dispatch, serving, weights
from tiers.vllm_model.backend import TiersAttentionBackend, TiersAttentionImpl
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.forked import apart
from tiers.vllm_model.gate import KnowledgeGate
from tiers.vllm_model.moe import FusedExperts, MoeFfn

logger = init_logger("vllm.tiers")


class LayerNorm(nn.LayerNorm):
    """vLLM has no layer norm; this one has the calling convention of its RMSNorm."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        if residual is None:
            return super().forward(x)
        residual = x + residual
        return super().forward(residual), residual


def make_norm(config: c.Norm, width: int) -> RMSNorm | GemmaRMSNorm | LayerNorm:
    if config.kind == "rms":
        # Gemma's is the one that scales by 1 + weight.
        return (GemmaRMSNorm if config.unit_offset else RMSNorm)(width, eps=config.eps)
    return LayerNorm(width, eps=config.eps, bias=config.has_bias)


class HeadsNorm(nn.Module):
    """RMS norm over the channels of all heads together, of which this rank holds some.

    Args:
        config: kind rms.
        width: channels on this rank.
        copies: ranks that hold the same heads.
    """

    def __init__(self, config: c.Norm, width: int, copies: int = 1) -> None:
        super().__init__()
        self.eps, self.offset, self.copies = config.eps, float(config.unit_offset), copies
        self.ranks = get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.ones(width))
        set_weight_attrs(self.weight, {"weight_loader": self._load})

    def _load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        part = get_tensor_model_parallel_rank() // self.copies
        parameter.data.copy_(whole[part * len(parameter) : (part + 1) * len(parameter)])

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        squares = exact.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            squares = tensor_model_parallel_all_reduce(squares)
        # Heads that several ranks hold are summed as often, and counted as often here.
        mean = squares / (x.shape[-1] * self.ranks)
        return (exact * torch.rsqrt(mean + self.eps) * (self.weight.float() + self.offset)).to(x.dtype)


class Rotary(RotaryEmbedding):
    """vLLM's rotary kernels, but where the one for the CPU ends the process: in 16 bits it stores 16 bytes at a time, to
    addresses that have to be multiples of 16."""

    def forward_cpu(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if query.element_size() == 2 and self.rotary_dim % 16:
            return self.forward_native(positions, query, key)
        return super().forward_cpu(positions, query, key)


def make_rope(config: c.Attention, max_positions: int) -> RotaryEmbedding | None:
    """vLLM's rotary kernel on the reference's table, so that every scaling is defined in one place."""
    turns = rotation(config.position)
    if turns is None:
        return None
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    return _make_rope(turns, config.head_dim, max_positions, device, dtype)


@functools.cache
def _make_rope(
    position: c.Rope, head_dim: int, max_positions: int, device: torch.device, dtype: torch.dtype
) -> RotaryEmbedding:
    """One layer per kind of positions: its table can be larger than the weights of a model's layer."""
    rotary, half = position.rotary_dim(head_dim), position.style == "half"
    layer = Rotary(head_dim, rotary, max_positions, position.theta, half, dtype, init_cache=False)
    table = apart(_rope_table, position, head_dim, max_positions, dtype)
    layer.register_buffer("cos_sin_cache", table.to(device), persistent=False)
    return layer


def _rope_table(position: c.Rope, head_dim: int, max_positions: int, dtype: torch.dtype) -> Tensor:
    with torch.device("cpu"):
        return rope_table(position, head_dim, max_positions).to(dtype)


class _Attention(Attention):
    """vLLM's layer, which asks a backend of ours to prove itself as soon as there is a cache to prove it on."""

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        if isinstance(self.impl, TiersAttentionImpl):
            self.impl.prove(kv_cache)


class TiersAttention(nn.Module):
    def __init__(
        self, config: c.Attention, model: c.ModelConfig, choice: Choice, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        # Contiguous groups of one size, whatever the map; the weights are rearranged to it when they load.
        layout = HeadLayout.of(config.heads, config.num_kv_heads)
        self.config, self.layout, self.max_positions = config, layout, model.max_position_embeddings
        self.device = torch.get_default_device()
        self.size = config.head_dim
        self.num_heads = layout.num_heads // ranks
        self.num_kv_heads = max(1, config.num_kv_heads // ranks)
        quant_config = vllm_config.quant_config
        self.qkv_proj = QKVParallelLinear(
            model.hidden_size, config.head_dim, layout.num_heads, config.num_kv_heads,
            bias=config.qkv_bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            layout.num_heads * config.head_dim, model.hidden_size,
            bias=config.o_bias, quant_config=quant_config, prefix=f"{prefix}.o_proj",
        )  # fmt: skip
        self.qk_norm = config.qk_norm
        norm = c.Norm("rms", model.norm.eps, unit_offset=model.norm.unit_offset)
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = make_norm(norm, config.head_dim), make_norm(norm, config.head_dim)
        elif config.qk_norm == "full":
            self.q_norm = HeadsNorm(norm, self.num_heads * config.head_dim)
            self.k_norm = HeadsNorm(
                norm, self.num_kv_heads * config.head_dim, copies=max(1, ranks // config.num_kv_heads)
            )
        self.rotary = make_rope(config, model.max_position_embeddings)
        for name, shape in learned(config.position, config.num_heads).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        # The model, where it owns a table of positions that layers share; in a tuple, so that it is no part of this one.
        self.owner: tuple[Any, ...] = ()
        ours: dict[str, Any] = {}
        if not choice.native:
            decay = xpos_decay(config.position, config.head_dim) if isinstance(config.position, c.Xpos) else None
            ours = {
                "attn_backend": TiersAttentionBackend, "pattern": config.pattern, "choice": choice,
                "longest": vllm_config.model_config.max_model_len,
                "most_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
                "bias": self.bias, "decay_D": decay,
            }  # fmt: skip
        elif isinstance(config.position, c.Alibi):
            slopes = self.bias()
            assert slopes is not None
            ours = {"alibi_slopes": slopes.factor_H.tolist()}
        self.attn = _Attention(
            self.num_heads, config.head_dim, config.softmax_scale, num_kv_heads=self.num_kv_heads,
            cache_config=vllm_config.cache_config, quant_config=quant_config, logits_soft_cap=config.softcap,
            prefix=f"{prefix}.attn", **ours,
        )  # fmt: skip

    def bias(self) -> Bias | None:
        """What distance adds to the scores of this rank's heads, from the parameters as they are now."""
        config = self.config
        own = {name: getattr(self, name) for name in learned(config.position, config.num_heads)}
        if self.owner:
            own["t5_bias"] = self.owner[0].t5_bias
        whole = apart(bias_of, config.position, config.num_heads, config.head_dim, self.max_positions, own, self.device)
        # Of all heads, then cut: a rank's bias depends on where its heads stand in the whole model.
        first = get_tensor_model_parallel_rank() * self.num_heads
        return None if whole is None else whole.arranged(self.layout).part(first, first + self.num_heads)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(x)
        q_width, kv_width = self.num_heads * self.size, self.num_kv_heads * self.size
        query, key, value = qkv.split([q_width, kv_width, kv_width], dim=-1)
        if self.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.qk_norm == "head":
            query = self.q_norm(query.unflatten(-1, (self.num_heads, self.size)).contiguous()).flatten(-2)
            key = self.k_norm(key.unflatten(-1, (self.num_kv_heads, self.size)).contiguous()).flatten(-2)
        if self.rotary is not None:
            query, key = self.rotary(positions, query, key)
        out, _ = self.o_proj(self.attn(query, key, value))
        return out


class GatedFfn(nn.Module):
    def __init__(
        self, config: c.Swiglu | c.Geglu, width: int, quant_config: object, prefix: str, reduce: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            width, [config.intermediate_size] * 2,
            bias=config.bias, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj",
        )  # fmt: skip
        self.down_proj = RowParallelLinear(
            config.intermediate_size, width, bias=config.bias, quant_config=quant_config, prefix=f"{prefix}.down_proj",
            reduce_results=reduce,
        )  # fmt: skip
        self.activation = SiluAndMul() if isinstance(config, c.Swiglu) else GeluAndMul(config.approximate)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.activation(gate_up))
        return out


def _shared_experts(width: int, quant_config: object, config: c.Swiglu | c.Geglu, prefix: str) -> GatedFfn:
    return GatedFfn(config, width, quant_config, prefix, reduce=False)


class GeluFfn(nn.Module):
    def __init__(self, config: c.Gelu, width: int, quant_config: object, prefix: str) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(
            width, config.intermediate_size, bias=config.bias, quant_config=quant_config, prefix=f"{prefix}.up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, width, bias=config.bias, quant_config=quant_config, prefix=f"{prefix}.down_proj"
        )
        self.activation = nn.GELU(approximate=config.approximate)

    def forward(self, x: Tensor) -> Tensor:
        up, _ = self.up_proj(x)
        out, _ = self.down_proj(self.activation(up))
        return out


class TiersLayer(nn.Module):
    """One layer. `delta` is the output of the sublayer before, not yet added to the residual stream `h`, so that vLLM's
    RMSNorm can add and normalise in one pass; None where there is nothing to add."""

    def __init__(
        self, config: c.Layer, model: c.ModelConfig, choices: dict[str, Choice], vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        quant_config = vllm_config.quant_config
        width = model.hidden_size
        self.parallel = model.residual == "parallel"
        self.multiplier = model.residual_multiplier
        before, after = model.norm_position != "post", model.norm_position != "pre"
        mixer, ffn = config.mixer, config.ffn
        self.mixer_norm = make_norm(model.norm, width) if before and mixer is not None else None
        self.ffn_norm = make_norm(model.norm, width) if before and ffn is not None else None
        self.mixer_post_norm = make_norm(model.norm, width) if after and mixer is not None else None
        self.ffn_post_norm = make_norm(model.norm, width) if after and ffn is not None else None
        self.mixer = None
        if mixer is not None:
            self.mixer = TiersAttention(mixer, model, choices["attention"], vllm_config, f"{prefix}.mixer")
        self.ffn: nn.Module | None = None
        if isinstance(ffn, c.Moe):
            # Summed over ranks together with the experts.
            shared = functools.partial(_shared_experts, width, quant_config)
            self.ffn = MoeFfn(ffn, width, choices["moe"], shared, vllm_config, f"{prefix}.ffn")
        elif isinstance(ffn, c.Gelu):
            self.ffn = GeluFfn(ffn, width, quant_config, f"{prefix}.ffn")
        elif ffn is not None:
            self.ffn = GatedFfn(ffn, width, quant_config, f"{prefix}.ffn")
        self.gate = None
        if config.gate is not None:
            self.gate = KnowledgeGate(
                config.gate, width, model.vocab_size, choices["gate"], quant_config, f"{prefix}.gate"
            )

    def forward(
        self, positions: Tensor, delta: Tensor | None, h: Tensor, token_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        if self.mixer is not None:
            x, h = _add_and_norm(self.mixer_norm, delta, h)
            delta = self._finished(self.mixer(positions, x), self.mixer_post_norm)
        if self.ffn is not None:
            if self.parallel and self.mixer is not None:
                x, _ = _add_and_norm(self.ffn_norm, None, h)
                assert delta is not None
                h, delta = h + delta + self._finished(self.ffn(x), self.ffn_post_norm), None
            else:
                x, h = _add_and_norm(self.ffn_norm, delta, h)
                delta = self._finished(self.ffn(x), self.ffn_post_norm)
        if self.gate is not None:
            h = self.gate(h if delta is None else h + delta, token_ids)
            delta = None
        return delta, h

    def _finished(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """The output of a sublayer as it is added to the residual stream."""
        x = x if norm is None else norm(x)
        return x if self.multiplier == 1.0 else x * self.multiplier


def _add_and_norm(norm: nn.Module | None, delta: Tensor | None, h: Tensor) -> tuple[Tensor, Tensor]:
    """What a sublayer reads, and the residual stream with `delta` added."""
    if norm is None:
        h = h if delta is None else h + delta
        return h, h
    return (norm(h), h) if delta is None else norm(delta, h)


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        "positions": {0: "b"},
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
    }
)
class TiersModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model = serving.model_config_of(vllm_config)
        self.config = model
        choices = serving.choose_tiers(vllm_config)
        if get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0:
            logger.info("Tiers of this model:\n%s", dispatch.table(choices, model))
        pp = get_pp_group()
        if pp.is_first_rank or (model.tie_word_embeddings and pp.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                model.vocab_size, model.hidden_size, prefix=f"{prefix}.embed_tokens"
            )
        else:
            self.embed_tokens = PPMissingLayer()
        if model.learned_positions:
            rows, width = model.max_position_embeddings, model.hidden_size
            self.embed_positions = nn.Embedding(rows, width) if pp.is_first_rank else PPMissingLayer()
        if model.embedding_norm:
            self.embed_norm = make_norm(model.norm, model.hidden_size) if pp.is_first_rank else PPMissingLayer()
        if model.t5_table is not None:
            self.t5_bias = nn.Parameter(torch.zeros(model.t5_table))

        def make_layer(prefix: str) -> TiersLayer:
            index = int(prefix.rpartition(".")[2])
            own = {choice.operator: choice for choice in choices if choice.layer == index}
            return TiersLayer(model.layers[index], model, own, vllm_config, prefix)

        self.start_layer, self.end_layer, self.layers = make_layers(
            model.num_hidden_layers, make_layer, prefix=f"{prefix}.layers"
        )
        for mixer in (module for module in self.modules() if isinstance(module, TiersAttention)):
            if isinstance(mixer.config.position, c.T5) and mixer.config.position.shared:
                mixer.owner = (self,)
        self.norm = make_norm(model.norm, model.hidden_size) if pp.is_last_rank else PPMissingLayer()
        # Later pipeline stages get no token ids from vLLM; a gate there that looks them up needs them sent along.
        self.sends_token_ids = any(layer.gate is not None and layer.gate.source == "token" for layer in model.layers)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        tensors = {"hidden_states": torch.zeros((batch_size, self.config.hidden_size), dtype=dtype, device=device)}
        if self.sends_token_ids:
            tensors["token_ids"] = torch.zeros(batch_size, dtype=torch.int32, device=device)
        return IntermediateTensors(tensors)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        h = self.embed_tokens(input_ids)
        if self.config.embedding_multiplier != 1.0:
            h = h * self.config.embedding_multiplier
        return h

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        token_ids = input_ids
        if get_pp_group().is_first_rank:
            if inputs_embeds is None:
                assert input_ids is not None
                inputs_embeds = self.embed_input_ids(input_ids)
            h = inputs_embeds
            if self.config.learned_positions:
                h = h + self.embed_positions(positions)
            if self.config.embedding_norm:
                h = self.embed_norm(h)
        else:
            assert intermediate_tensors is not None
            h = intermediate_tensors["hidden_states"]
            if self.sends_token_ids:
                token_ids = intermediate_tensors["token_ids"]
        delta: Tensor | None = None
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            delta, h = layer(positions, delta, h, token_ids)
        if not get_pp_group().is_last_rank:
            tensors = {"hidden_states": h if delta is None else h + delta}
            if self.sends_token_ids:
                assert token_ids is not None
                tensors["token_ids"] = token_ids.to(torch.int32)
            return IntermediateTensors(tensors)
        if delta is None:
            return self.norm(h)
        h, _ = self.norm(delta, h)
        return h


class TiersForCausalLM(nn.Module, SupportsLoRA, SupportsPP, MixtureOfExperts):
    """The class that vLLM builds for architecture TiersForCausalLM.

    Keep flags of vLLM's interfaces in this file: vLLM caches them by the hash of the file that defines the class.
    """

    # Adapters name modules as the checkpoint does: layers.0.mixer.q_proj.
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"layers.": "model.layers.", "embed_tokens.": "model.embed_tokens.", "norm.": "model.norm."}
    )
    packed_modules_mapping = {  # noqa: RUF012  vLLM reads it from the class
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}  # noqa: RUF012

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        serving.check_vllm_config(vllm_config)
        model = serving.model_config_of(vllm_config)
        self.config = model
        self.quant_config = vllm_config.quant_config
        self.weight_map = serving.weight_map(vllm_config)
        self.model = TiersModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                model.vocab_size, model.hidden_size,
                bias=model.lm_head_bias, quant_config=self.quant_config, prefix=maybe_prefix(prefix, "lm_head"),
            )  # fmt: skip
            if model.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
            self.logits_processor = LogitsProcessor(
                model.vocab_size, scale=model.logits_multiplier, soft_cap=model.logits_softcap
            )
        else:
            self.lm_head = PPMissingLayer()
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self._offer_experts(vllm_config.parallel_config)

    def _offer_experts(self, parallel: Any) -> None:
        """Say what vLLM may move between ranks: nothing unless it is asked to, by --enable-eplb."""
        found = [module for module in self.modules() if isinstance(module, FusedExperts) and module.moves]
        self.expert_weights: Any = []
        self.moe_layers = [module.experts for module in found]
        self.num_moe_layers = len(found)
        self.num_logical_experts = self.num_routed_experts = found[0].config.num_experts if found else 0
        self.num_redundant_experts = found[0].copies if found else 0
        self.num_physical_experts = self.num_logical_experts + self.num_redundant_experts
        self.num_local_physical_experts = self.num_physical_experts // parallel.tensor_parallel_size
        groups = {module.config.groups for module in found}
        self.num_expert_groups = groups.pop() if len(groups) == 1 else 1
        # They are layers of their own, cut by tensor parallelism.
        self.num_shared_experts = 0

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        """Asked where the number of ranks changes while serving, which needs data parallelism, which is refused."""
        raise NotImplementedError("the number of ranks that share experts cannot change while serving")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        bias = self.lm_head.bias if self.config.lm_head_bias else None
        return self.logits_processor(self.lm_head, hidden_states, bias)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = mapped(self.weight_map, tensors)
        filled = apart(weights.load, self, self.config, named, self.quant_config is None)
        for module in self.modules():
            if isinstance(module, KnowledgeGate):
                module.prove()
            elif isinstance(module, MoeFfn):
                module.served.remember()
            # Again where weights are loaded into a running engine.
            if isinstance(module, TiersAttention) and isinstance(module.attn.impl, TiersAttentionImpl):
                module.attn.impl.process_weights_after_loading(torch.get_default_dtype())
        return filled
