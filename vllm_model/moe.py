"""Mixture of experts inside vLLM: the router, the experts on the tier that was chosen, shared experts.

Legend: T tokens, M model width, E experts, L experts of this rank, F inner width of an expert on this rank.

Every tier has the same weights, w13 [L, 2 F, M] (gate above up) and w2 [L, M, F], cut along F by tensor parallelism or
along L by expert parallelism; what the ranks compute is summed at the end, together with the shared experts.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name

from tiers.reference import config as c
from tiers.reference.errors import ServingError
from tiers.reference.ops.moe import balance, route
from tiers.vllm_model import compat, dispatch, metrics
from tiers.vllm_model.dispatch import Choice
from tiers.vllm_model.plan import Tier
from tiers.vllm_model.self_check import BUDGET

logger = init_logger("vllm.tiers")

# Numbers of tokens on which vLLM's layer is compared with the reference.
PROOF = (1, 17, 100)

# Tensor of an expert in a checkpoint -> the stacked parameter, and vLLM's name for the part.
PARTS = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}


class Experts(nn.Module):
    """Weights of this rank's experts for the tiers that are ours.

    Args:
        config: of all experts.
        width: M.
        ranks, rank: how many share the experts, and which of them this is.
        split: what each rank has: "inner", a part of every expert, or "experts", some of them whole.
    """

    # Only vLLM's own layer is told where experts are after they moved.
    moves = False

    def __init__(self, config: c.Moe, width: int, ranks: int, rank: int, split: str) -> None:
        super().__init__()
        whole = split == "experts"
        self.held = config.num_experts // ranks if whole else config.num_experts
        self.first = rank * self.held if whole else 0
        self.inner = config.intermediate_size if whole else config.intermediate_size // ranks
        self.offset = 0 if whole else rank * self.inner
        self.w13 = nn.Parameter(torch.empty(self.held, 2 * self.inner, width), requires_grad=False)
        self.w2 = nn.Parameter(torch.empty(self.held, width, self.inner), requires_grad=False)

    def load(self, expert: int, name: str, tensor: Tensor) -> None:
        """Keep this rank's part of a matrix; `name` is a key of PARTS."""
        expert -= self.first
        if not 0 <= expert < self.held:
            return
        columns = slice(self.offset, self.offset + self.inner)
        if name == "down_proj":
            self.w2.data[expert].copy_(tensor[:, columns])
        else:
            row = 0 if name == "gate_proj" else self.inner
            self.w13.data[expert, row : row + self.inner].copy_(tensor[columns])

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """gate [L, F, M], up [L, F, M] and down [L, M, F]: views."""
        return self.w13[:, : self.inner], self.w13[:, self.inner :], self.w2


class FusedExperts(nn.Module):
    """Weights of this rank's experts in vLLM's fused layer, which decides how they lie in memory.

    Args:
        config, width: as of Experts.
        correction: [E] or None; see `route`.
        quant_config: of the model.
        prefix: full name of this module.
    """

    def __init__(
        self, config: c.Moe, width: int, correction: Tensor | None, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.config, self.correction, self.width = config, correction, width
        parallel = vllm_config.parallel_config
        # With --enable-eplb vLLM moves experts between ranks while it serves, and may keep some of them twice.
        self.moves = parallel.enable_eplb
        self.copies = parallel.eplb_config.num_redundant_experts if self.moves else 0
        # vLLM finds the weights by these names.
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts, top_k=config.top_k, hidden_size=width,
            intermediate_size=config.intermediate_size, renormalize=config.renormalize, activation=config.activation,
            quant_config=vllm_config.quant_config, prefix=f"{prefix}.experts", reduce_results=False,
            router_logits_dtype=torch.float32, enable_eplb=self.moves, num_redundant_experts=self.copies, **self._routing(),
        )  # fmt: skip
        self.inner = config.intermediate_size // self.experts.moe_config.moe_parallel_config.tp_size
        self.first = self.experts.moe_config.moe_parallel_config.ep_rank * (
            self.experts.moe_config.num_local_experts if self.experts.moe_config.moe_parallel_config.use_ep else 0
        )

    def _routing(self) -> dict[str, Any]:
        """vLLM's own router where it follows our rule, else ours."""
        config = self.config
        if is_plain(config) and not self._maps_here:
            return {}
        if has_native_routing(config) and not self._maps_here:
            return {
                "use_grouped_topk": True, "num_expert_group": config.groups, "topk_group": config.top_groups,
                "scoring_func": config.score, "routed_scaling_factor": config.routed_scaling_factor,
                "e_score_correction_bias": self.correction,
            }  # fmt: skip
        return {"custom_routing_function": self._route}

    @property
    def _maps_here(self) -> bool:
        """vLLM's CPU kernel takes ids of experts for rows of its weights, whichever experts a rank holds."""
        parallel = get_current_vllm_config().parallel_config
        return (
            compat.device_type() == "cpu"
            and parallel.enable_expert_parallel
            and get_tensor_model_parallel_world_size() > 1
        )

    def _route(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights, ids = route(gating_output.float(), self.correction, self.config)
        held = self.experts.routed_experts._expert_map
        if held is not None and weights.device.type == "cpu":
            local = held[ids]
            weights, ids = torch.where(local >= 0, weights, 0), local.clamp(min=0)
        return weights, ids.to(torch.int32)

    def load(self, expert: int, name: str, tensor: Tensor) -> None:
        """As `Experts.load`, through vLLM's loader, which pads and places as the kernel wants it."""
        stack, part = PARTS[name]
        parameter = getattr(self.experts.routed_experts, f"{stack}_weight")
        # Behind the experts lie the copies, which start as those of the first ones, around and around.
        for place in range(expert, self.config.num_experts + self.copies, self.config.num_experts):
            parameter.weight_loader(parameter, tensor, f"{stack}_weight", part, place)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `Experts.matrices`, copies included; only while the weights lie as they were loaded."""
        own = self.experts.routed_experts
        w13, w2 = own.w13_weight, own.w2_weight
        half = w13.shape[1] // 2
        gate, up = w13[:, : self.inner, : self.width], w13[:, half : half + self.inner, : self.width]
        return gate, up, w2[:, : self.width, : self.inner]

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        return self.experts(hidden, logits)


def is_plain(config: c.Moe) -> bool:
    """Routing by the largest softmax alone."""
    return (
        config.score == "softmax" and config.groups == 1 and not config.correction_bias
        and config.routed_scaling_factor == 1.0
    )  # fmt: skip


def has_native_routing(config: c.Moe) -> bool:
    """Whether vLLM's grouped routing is ours: it scores groups by two experts where there is a correction, else by one."""
    if config.groups == 1:
        return config.num_experts > 1
    return (config.group_score == "top2") == config.correction_bias


class MoeTier:
    """The experts of one layer on the tier that was chosen; vLLM's layer is proved when it is first called.

    Attributes:
        tier: what serves: the choice, or a slower one if the choice failed its proof.
    """

    def __init__(
        self, choice: Choice, config: c.Moe, experts: Experts | FusedExperts, correction: Tensor | None
    ) -> None:
        self.choice, self.config, self.experts, self.correction = choice, config, experts, correction
        self.expected: list[Tensor] = []
        self.corner: tuple[Tensor, ...] = ()
        self.rate, self.random = 0.0, random.Random(choice.layer)
        self._use(choice.tier)

    def _use(self, tier: Tier) -> None:
        self.tier = tier
        self.function = None if tier is Tier.FAST else dispatch.function("moe", tier)

    def __call__(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """[T, M] and [T, E] to [T, M]: what the experts of this rank add.

        Raises:
            ServingError: the tier failed its proof, and the plan asked for it by name or nothing else can serve.
        """
        if self.expected and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.prove(hidden)
        if self.rate and self.random.random() < self.rate:
            self._sample(logits)
        return self._run(hidden, logits)

    def _sample(self, logits: Tensor) -> None:
        """Count how the tokens of this step fall on experts; not of runs without requests, nor while a graph is captured."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        # Rows beyond are padding.
        own = next(iter(metadata.values()))
        tokens = getattr(own, "num_tokens", None) or getattr(own, "num_actual_tokens", len(logits))
        if not tokens:
            return
        counts, loss = balance(logits[:tokens], route(logits[:tokens], self.correction, self.config)[1])
        metrics.count_experts(self.choice.layer, counts.tolist(), loss.item())

    def _run(self, hidden: Tensor, logits: Tensor) -> Tensor:
        if self.function is None:
            return self.experts(hidden, logits)
        return self._by(self.function, hidden, logits)

    def _by(self, function: Callable[..., Tensor], hidden: Tensor, logits: Tensor) -> Tensor:
        return function(hidden, logits, self.correction, *self.experts.matrices(), self.config, self.experts.first)

    def _by_reference(self, hidden: Tensor, logits: Tensor) -> Tensor:
        """Copies, which lie behind all experts, add nothing to the sum over ranks, and a rank may hold nothing else."""
        first = self.experts.first
        own = tuple(matrix[: max(0, self.config.num_experts - first)] for matrix in self.experts.matrices())
        if not len(own[0]):
            return torch.zeros_like(hidden)
        reference = dispatch.function("moe", Tier.REFERENCE)
        return reference(hidden, logits, self.correction, *own, self.config, first)

    def remember(self) -> None:
        """After loading: what the reference computes, since vLLM may lay out its weights in a way that nobody else reads.

        The other tiers of ours are proved at once.
        """
        if self.tier is Tier.REFERENCE:
            return
        weight = self.experts.matrices()[2]
        self.expected = [self._by_reference(*self._inputs(count, weight)) for count in PROOF]
        self.corner = tuple(matrix[-1, :, :1].clone() for matrix in self.experts.matrices())
        if self.tier is not Tier.FAST:
            self.prove(weight)

    def _inputs(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(like.device).manual_seed(count)

        def randn(width: int) -> Tensor:
            return torch.randn(count, width, generator=generator, device=like.device, dtype=torch.float32)

        # Scores so far apart that rounding decides nothing.
        return randn(self.experts.matrices()[2].shape[1]).to(like.dtype), 4 * randn(self.config.num_experts)

    def prove(self, like: Tensor) -> None:
        """Compare the tier with what the reference computed; on failure take the next slower tier, or stop."""
        while self.expected and self.tier is not Tier.REFERENCE:
            failure = self._failure(like)
            if failure is None:
                break
            where = f"layer {self.choice.layer}: the experts on tier {self.tier.value} {failure}"
            other = f"--tiers 'auto,{self.choice.layer}.moe=reference'"
            if self.experts.moves:  # other tiers would not know where experts are
                raise ServingError(f"{where}. Use another tier for it, and leave --enable-eplb out: {other}")
            if self.choice.named or not self._lies_as_loaded():
                raise ServingError(f"{where}. Use another tier for it: {other}")
            self._use(self.choice.slower(self.tier))
            logger.warning("%s; this layer is served by tier %s", where, self.tier.value)
        self.expected = []

    def _failure(self, like: Tensor) -> str | None:
        try:
            for count, expected in zip(PROOF, self.expected, strict=True):
                actual, expected = self._run(*self._inputs(count, like)).float(), expected.float()
                if self.experts.moves:  # a token may go to either copy of an expert, so only the sum is determined
                    actual, expected = map(tensor_model_parallel_all_reduce, (actual, expected))
                difference, largest = (actual - expected).abs().max(), expected.abs().max()
                budget = BUDGET[like.dtype]
                if not difference <= budget * largest:  # so NaN is no agreement, and zeros only of zeros are
                    error = (difference / largest).item()
                    return f"differ from the reference by {error:.3g} of the largest value (budget {budget:g})"
        except Exception as error:  # whatever a compiler or driver raises: the tier cannot serve
            return f"failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
        return None

    def _lies_as_loaded(self) -> bool:
        try:
            now = tuple(matrix[-1, :, :1] for matrix in self.experts.matrices())
        except IndexError:
            return False
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(now, self.corner, strict=True))


# As of the gate: the name of the layer is an input of the compiled graph, and which tier serves is decided at every call.
def _moe(hidden: Tensor, logits: Tensor, layer: LayerNameType) -> Tensor:
    served: MoeTier = get_forward_context().no_compile_layers[_resolve_layer_name(layer)]
    out = served(hidden, logits)
    metrics.count("moe", served.tier.value)
    return out


def _moe_fake(hidden: Tensor, logits: Tensor, layer: LayerNameType) -> Tensor:
    return torch.empty_like(hidden)


compat.register_op("moe", _moe, _moe_fake)


class MoeFfn(nn.Module):
    """`router`, `correction_bias`, `experts`, and `shared` with `shared_gate`.

    Args:
        config: what to build.
        width: M.
        choice: which implementation to call.
        shared: builds the ffn that shared experts are, given its config and name, without the sum over ranks.
        vllm_config: of the engine.
        prefix: full name of this module.
    """

    def __init__(
        self, config: c.Moe, width: int, choice: Choice, shared: Callable[[c.Swiglu | c.Geglu, str], nn.Module],
        vllm_config: VllmConfig, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.prefix = config, prefix
        self.ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        # In float32 whatever is served, as in the reference.
        self.router = nn.Linear(width, config.num_experts, bias=False, dtype=torch.float32).requires_grad_(False)
        self.correction_bias = None
        if config.correction_bias:
            correction = torch.zeros(config.num_experts, dtype=torch.float32)
            self.correction_bias = nn.Parameter(correction, requires_grad=False)
        self.experts: Experts | FusedExperts
        if choice.tier is Tier.FAST:
            # Not as a parameter, which would then be one of vLLM's layer too.
            own = None if self.correction_bias is None else self.correction_bias.data
            self.experts = FusedExperts(config, width, own, vllm_config, prefix)
        else:
            whole = vllm_config.parallel_config.enable_expert_parallel and self.ranks > 1
            self.experts = Experts(config, width, self.ranks, rank, "experts" if whole else "inner")
        self.shared = self.shared_gate = None
        if config.shared_intermediate_size is not None:
            self.shared = shared(shared_ffn(config), f"{prefix}.shared")
            if config.shared_gate:
                self.shared_gate = nn.Linear(width, 1, bias=False).requires_grad_(False)
                # Its row is the whole of it on every rank.
                set_weight_attrs(self.shared_gate.weight, {"weight_loader": _copy})
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers are named {prefix}")
        self.served = layers[prefix] = MoeTier(choice, config, self.experts, self.correction_bias)
        # Every rank routes every token, so the first one counts for all.
        if rank == 0:
            self.served.rate = metrics.balance_rate(vllm_config.additional_config)

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] to [T, M]."""
        logits = nn.functional.linear(x.float(), self.router.weight)
        out = torch.ops.tiers.moe(x, logits, _encode_layer_name(self.prefix))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(x)) * shared
            out = out + shared
        return out if self.ranks == 1 else tensor_model_parallel_all_reduce(out)


def shared_ffn(config: c.Moe) -> c.Swiglu | c.Geglu:
    """What the shared experts are together."""
    assert config.shared_intermediate_size is not None
    if config.activation == "silu":
        return c.Swiglu(config.shared_intermediate_size)
    return c.Geglu(config.shared_intermediate_size, approximate="tanh" if config.activation == "gelu_tanh" else "none")


def _copy(parameter: nn.Parameter, whole: Tensor) -> None:
    parameter.data.copy_(whole)
