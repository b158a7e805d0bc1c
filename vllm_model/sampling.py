"""Ids without a token are not sampled. A head often has more rows than the tokenizer has tokens, and nobody can read them.

Log-probabilities stay those of the whole head: vLLM takes them before its logits processors, unless it is asked for
processed ones.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from tiers.reference.analysis.vocabulary import without_token

logger = init_logger("vllm.tiers")


def ids_without_token(model_config: Any, vocab_size: int) -> list[int]:
    """Ids below `vocab_size` that the tokenizer of the engine has no token for; none if it has no tokenizer.

    Raises:
        CheckpointError: tokenizer.json cannot be read.
    """
    folder = Path(model_config.tokenizer or model_config.model)
    if model_config.skip_tokenizer_init or not folder.is_dir():
        return []
    return without_token(folder, vocab_size)


def mask_ids_without_token(vllm_config: Any, vocab_size: int) -> None:
    """Have the sampler of this engine pass over ids without a token. Does nothing a second time."""
    model_config = vllm_config.model_config
    ids = ids_without_token(model_config, vocab_size)
    if not ids:
        return
    second_runner = vllm_config.use_v2_model_runner
    what = f"{len(ids)} ids, {ids[0]} the first, have a row of the head but no token in tokenizer.json"
    if vllm_config.speculative_config is not None and not second_runner:
        logger.warning(
            "%s; they can be sampled, since vLLM's first model runner has no place for this beside drafts", what
        )
        return
    name = f"{__name__}:{(TokensOnlyV2 if second_runner else TokensOnly).__name__}"
    others = list(model_config.logits_processors or ())
    if name not in others:
        model_config.logits_processors = [*others, name]
        logger.info("%s; they are not sampled", what)


def _ids(vllm_config: Any, device: torch.device) -> Tensor:
    from tiers.vllm_model.serving import model_config_of

    vocab_size = model_config_of(vllm_config).vocab_size
    return torch.tensor(ids_without_token(vllm_config.model_config, vocab_size), dtype=torch.long, device=device)


class TokensOnly(LogitsProcessor):
    """For vLLM's first model runner."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.ids = _ids(vllm_config, device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        """[requests, V] logits, changed in place."""
        return logits.index_fill_(1, self.ids, float("-inf"))


class TokensOnlyV2(LogitsProcessorV2):
    """For vLLM's second model runner."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.ids = _ids(vllm_config, req_states.device)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """[rows, V] logits, changed in place."""
        return logits.index_fill_(1, self.ids, float("-inf"))
