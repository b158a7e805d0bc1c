"""The whole model, top to bottom, as one would write it on paper.

Legend: T tokens of one sequence, S tokens so far (earlier ones in the cache), M model width, H query heads, KV
key/value heads, D head size, V vocabulary.

The parameter names here are the names of a checkpoint: `state_dict()` is the list that weight loading is checked against.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiers.reference import config as c
from tiers.reference.ops import ffn, norm
from tiers.reference.ops.attention import attention
from tiers.reference.ops.bias import Bias, bias_of
from tiers.reference.ops.knowledge_bank import knowledge_bank
from tiers.reference.ops.knowledge_gate import knowledge_gate
from tiers.reference.ops.moe import moe
from tiers.reference.ops.rope import rope, rope_table
from tiers.reference.ops.xpos import xpos_decay
from tiers.reference.positions import learned, rotation

# Layers with the same positions share a table: it can be larger than their weights.
_rope_table = functools.lru_cache(maxsize=8)(rope_table)


@dataclass
class Cache:
    """Keys and values of the tokens seen so far, per layer: [S, KV, D] each."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return next(iter(self.keys.values())).shape[0] if self.keys else 0

    def append(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the tokens of one step; returns all keys and values of the layer."""
        if layer in self.keys:
            key_TKD = torch.cat((self.keys[layer], key_TKD))
            value_TKD = torch.cat((self.values[layer], value_TKD))
        self.keys[layer], self.values[layer] = key_TKD, value_TKD
        return key_TKD, value_TKD


class Norm(nn.Module):
    def __init__(self, config: c.Norm, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.has_bias else None

    def forward(self, x_TM: Tensor) -> Tensor:
        if self.config.kind == "rms":
            return norm.rms_norm(x_TM, self.weight, self.config.eps, float(self.config.unit_offset))
        return norm.layer_norm(x_TM, self.weight, self.bias, self.config.eps)


class Attention(nn.Module):
    table_PR: Tensor
    decay_D: Tensor | None

    def __init__(self, config: c.Attention, model: c.ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.max_positions = config, layer, model.max_position_embeddings
        width, size = model.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * size, width, bias=config.o_bias)
        if config.qk_norm != "none":
            full = config.qk_norm == "full"
            qk_norm = c.Norm("rms", model.norm.eps, unit_offset=model.norm.unit_offset)
            self.q_norm = Norm(qk_norm, size * (config.num_heads if full else 1))
            self.k_norm = Norm(qk_norm, size * (config.num_kv_heads if full else 1))
        self.head_map = None if config.head_map == "contiguous" else config.heads
        # Derived from the config, so no part of a checkpoint; on the CPU, since a meta model still knows its config.
        with torch.device("cpu"):
            self.turns = rotation(config.position)
            if self.turns is not None:
                table = _rope_table(self.turns, size, model.max_position_embeddings)
                self.register_buffer("table_PR", table, persistent=False)
            decay = xpos_decay(config.position, size) if isinstance(config.position, c.Xpos) else None
            self.register_buffer("decay_D", decay, persistent=False)
        for name, shape in learned(config.position, config.num_heads).items():
            self.register_parameter(name, nn.Parameter(torch.rand(shape)))
        # The model, where it owns a table of positions that layers share; in a tuple, so that it is no part of this one.
        self.owner: tuple[Any, ...] = ()

    def bias(self) -> Bias | None:
        """What distance adds to the scores of this layer, from its parameters as they are now."""
        position, heads = self.config.position, self.config.num_heads
        own = {name: getattr(self, name) for name in learned(position, heads)}
        if self.owner:
            own["t5_bias"] = self.owner[0].t5_bias
        device = self.q_proj.weight.device
        return bias_of(position, heads, self.config.head_dim, self.max_positions, own, device)

    def forward(self, x_TM: Tensor, positions_T: Tensor, cache: Cache) -> Tensor:
        size = self.config.head_dim
        query, key, value = self.q_proj(x_TM), self.k_proj(x_TM), self.v_proj(x_TM)
        if self.config.qk_norm == "full":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.unflatten(-1, (-1, size)) for part in (query, key, value))
        if self.config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        if self.turns is not None:
            query = rope(query, positions_T, self.table_PR, self.turns.style)
            key = rope(key, positions_T, self.table_PR, self.turns.style)
        key, value = cache.append(self.layer, key, value)
        out_THD = attention(
            query, key, value,
            scale=self.config.softmax_scale, pattern=self.config.pattern, head_map=self.head_map,
            bias=self.bias(), decay_D=self.decay_D, softcap=self.config.softcap,
        )  # fmt: skip
        return self.o_proj(out_THD.flatten(1))


class Ffn(nn.Module):
    def __init__(self, config: c.Swiglu | c.Geglu | c.Gelu, width: int) -> None:
        super().__init__()
        self.config = config
        inner = config.intermediate_size
        self.gate_proj = None if isinstance(config, c.Gelu) else nn.Linear(width, inner, bias=config.bias)
        self.up_proj = nn.Linear(width, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, width, bias=config.bias)

    def forward(self, x_TM: Tensor) -> Tensor:
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if gate is None:
            assert isinstance(self.config, c.Gelu)
            return ffn.gelu(x_TM, up.weight, down.weight, up.bias, down.bias, self.config.approximate)
        six = (gate.weight, up.weight, down.weight, gate.bias, up.bias, down.bias)
        if isinstance(self.config, c.Geglu):
            return ffn.geglu(x_TM, *six, self.config.approximate)
        return ffn.swiglu(x_TM, *six)


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class MoeFfn(nn.Module):
    def __init__(self, config: c.Moe, width: int) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(width, config.num_experts, bias=False)
        self.correction_bias = nn.Parameter(torch.zeros(config.num_experts)) if config.correction_bias else None
        self.experts = nn.ModuleList(Expert(width, config.intermediate_size) for _ in range(config.num_experts))
        shared = config.shared_intermediate_size
        self.shared = Expert(width, shared) if shared is not None else None
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None

    def logits(self, x_TM: Tensor) -> Tensor:
        """[T, E] float32: 16 bits would make ties of experts, and another choice, out of rounding."""
        exact = torch.float64 if x_TM.dtype == torch.float64 else torch.float32
        return nn.functional.linear(x_TM.to(exact), self.router.weight.to(exact))

    def correction(self, logits_TE: Tensor) -> Tensor | None:
        """[E] what is added to scores for the choice alone, in the dtype of the logits."""
        return None if self.correction_bias is None else self.correction_bias.to(logits_TE.dtype)

    def matrices(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """gate, up and down of each expert."""
        gate, up, down = (
            [getattr(e, name).weight for e in self.experts] for name in ("gate_proj", "up_proj", "down_proj")
        )
        return gate, up, down

    def forward(self, x_TM: Tensor) -> Tensor:
        logits_TE = self.logits(x_TM)
        out_TM = moe(x_TM, logits_TE, self.correction(logits_TE), *self.matrices(), self.config)
        if self.shared is None:
            return out_TM
        three = (self.shared.gate_proj.weight, self.shared.up_proj.weight, self.shared.down_proj.weight)
        if self.config.activation == "silu":
            shared_TM = ffn.swiglu(x_TM, *three)
        else:
            approximate = "tanh" if self.config.activation == "gelu_tanh" else "none"
            shared_TM = ffn.geglu(x_TM, *three, approximate=approximate)
        if self.shared_gate is not None:
            shared_TM = torch.sigmoid(self.shared_gate(x_TM)) * shared_TM
        return out_TM + shared_TM


def make_ffn(config: c.Swiglu | c.Geglu | c.Gelu | c.Moe, width: int) -> Ffn | MoeFfn:
    return MoeFfn(config, width) if isinstance(config, c.Moe) else Ffn(config, width)


class Gate(nn.Module):
    def __init__(self, config: c.Gate, model: c.ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = model.hidden_size
        self.proj = nn.Linear(2 * width, width, bias=config.bias)
        if config.source == "token":
            self.table = nn.Embedding(model.vocab_size, width)
        else:
            self.scale = config.scale if config.scale is not None else width**-0.5
            self.bank_keys = nn.Parameter(torch.randn(config.slots or 0, width))
            self.bank_values = nn.Parameter(torch.randn(config.slots or 0, width))

    def forward(self, hidden_TM: Tensor, ids_T: Tensor) -> Tensor:
        if self.config.source == "token":
            knowledge_TM = self.table(ids_T)
        else:
            knowledge_TM = knowledge_bank(hidden_TM, self.bank_keys, self.bank_values, self.scale)
        return knowledge_gate(hidden_TM, knowledge_TM, self.proj.weight, self.proj.bias, self.config.mode)


class Layer(nn.Module):
    def __init__(self, config: c.Layer, model: c.ModelConfig, index: int) -> None:
        super().__init__()
        self.parallel = model.residual == "parallel"
        self.multiplier = model.residual_multiplier
        width = model.hidden_size
        before = model.norm_position in ("pre", "sandwich")
        after = model.norm_position in ("post", "sandwich")

        def norm(wanted: bool, sublayer: object) -> nn.Module:
            return Norm(model.norm, width) if wanted and sublayer is not None else nn.Identity()

        self.mixer_norm = norm(before, config.mixer)
        self.mixer = Attention(config.mixer, model, index) if config.mixer is not None else None
        self.mixer_post_norm = norm(after, config.mixer)
        self.ffn_norm = norm(before, config.ffn)
        self.ffn = make_ffn(config.ffn, width) if config.ffn is not None else None
        self.ffn_post_norm = norm(after, config.ffn)
        self.gate = Gate(config.gate, model) if config.gate else None

    def forward(self, h_TM: Tensor, positions_T: Tensor, ids_T: Tensor, cache: Cache) -> Tensor:
        read_TM = h_TM
        if self.mixer is not None:
            mixed_TM = self.mixer_post_norm(self.mixer(self.mixer_norm(h_TM), positions_T, cache)) * self.multiplier
            h_TM = h_TM + mixed_TM
        if self.ffn is not None:
            # In parallel the ffn reads what the mixer read.
            read_TM = read_TM if self.parallel else h_TM
            h_TM = h_TM + self.ffn_post_norm(self.ffn(self.ffn_norm(read_TM))) * self.multiplier
        return self.gate(h_TM, ids_T) if self.gate is not None else h_TM


class ReferenceModel(nn.Module):
    """A decoder for one sequence at a time.

    Args:
        config: what to build. Parameters start at torch's defaults; `tiers.reference.load.load_model` fills them.
    """

    def __init__(self, config: c.ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.embed_norm = Norm(config.norm, config.hidden_size) if config.embedding_norm else None
        self.layers = nn.ModuleList(Layer(layer, config, i) for i, layer in enumerate(config.layers))
        if config.t5_table is not None:
            self.t5_bias = nn.Parameter(torch.rand(config.t5_table))
            for mixer in (module for module in self.modules() if isinstance(module, Attention)):
                if isinstance(mixer.config.position, c.T5) and mixer.config.position.shared:
                    mixer.owner = (self,)
        self.norm = Norm(config.norm, config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)

    def embed(self, ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """[T, M] what the first layer reads."""
        h_TM = self.embed_tokens(ids_T) * self.config.embedding_multiplier
        if self.config.learned_positions:
            h_TM = h_TM + self.embed_positions(positions_T)
        return self.embed_norm(h_TM) if self.embed_norm is not None else h_TM

    def forward(self, ids_T: Tensor, cache: Cache | None = None) -> Tensor:
        """Run the next T tokens of a sequence.

        Args:
            ids_T: [T] token ids.
            cache: what came before; a new one for a whole sequence. Updated in place.

        Returns:
            [T, V] logits.
        """
        cache = Cache() if cache is None else cache
        positions_T = torch.arange(cache.length, cache.length + len(ids_T), device=ids_T.device)
        h_TM = self.embed(ids_T, positions_T)
        for layer in self.layers:
            h_TM = layer(h_TM, positions_T, ids_T, cache)
        h_TM = self.norm(h_TM)
        tied = self.config.tie_word_embeddings
        logits_TV = nn.functional.linear(h_TM, self.embed_tokens.weight) if tied else self.lm_head(h_TM)
        if self.config.logits_softcap is not None:
            logits_TV = torch.tanh(logits_TV / self.config.logits_softcap) * self.config.logits_softcap
        return logits_TV * self.config.logits_multiplier


def parameter_shapes(config: c.ModelConfig) -> Mapping[str, torch.Size]:
    """Name and shape of every tensor that a checkpoint of this model holds; allocates nothing."""
    # Rotary tables are made on the CPU and are no part of a checkpoint: one row each is enough.
    if not config.learned_positions:
        config = dataclasses.replace(config, max_position_embeddings=1)
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in ReferenceModel(config).state_dict().items()}
