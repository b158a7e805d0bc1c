"""Writing to the cache in Triton: where each token goes, and that nothing else is touched."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs CUDA, or the interpreter in a process of its own (see test_interpreter.py)",
)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float32, torch.float32), (torch.float32, torch.float16)])
def test_tokens_go_to_their_slots_and_nowhere_else(layout: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    from tiers.vllm_model.ops.store_tokens import store_tokens

    blocks, kv_heads, page, size = 5, 3, 16, 40
    shape = (blocks, kv_heads, page, 2 * size) if layout == "HND" else (blocks, page, kv_heads, 2 * size)
    cache = torch.full(shape, float("nan"), dtype=cache_dtype, device=DEVICE)
    cache = cache if layout == "HND" else cache.permute(0, 2, 1, 3)
    # As vLLM has them: parts of one projection, and more rows than slots.
    qkv = torch.randn(9, 7 * kv_heads * size, dtype=dtype, device=DEVICE)
    key = qkv[:, 5 * kv_heads * size : 6 * kv_heads * size].unflatten(1, (kv_heads, size))
    value = qkv[:, 6 * kv_heads * size :].unflatten(1, (kv_heads, size))
    slots = torch.tensor([3, 16, 79, -1, 31, 32, -1], device=DEVICE)
    store_tokens(key, value, cache, slots)
    expected = torch.full((blocks, kv_heads, page, 2 * size), float("nan"), dtype=cache_dtype, device=DEVICE)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            both = torch.cat((key[token], value[token]), dim=-1).to(cache_dtype)
            expected[slot // page, :, slot % page] = both
    assert torch.equal(cache.nan_to_num(1e4), expected.nan_to_num(1e4))


def test_no_token_is_no_work() -> None:
    from tiers.vllm_model.ops.store_tokens import store_tokens

    key = torch.randn(2, 1, 32, device=DEVICE)
    cache = torch.zeros(2, 1, 16, 64, device=DEVICE)
    store_tokens(key, key, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert not cache.any()
