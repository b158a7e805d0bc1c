"""Write the keys and values of a step into the paged cache, in one kernel.

Legend: T tokens, KV key/value heads, D head size, B blocks in the cache, N tokens per block.
"""

import triton
import triton.language as tl
from torch import Tensor

from tiers.vllm_model.ops.topk_kernels import early_launch


def store_tokens(key_TKD: Tensor, value_TKD: Tensor, cache_BKNC: Tensor, slots_T: Tensor) -> None:
    """Store each token in its slot, rounded to the dtype of the cache.

    Args:
        key_TKD: [T or more, KV, D]; only the first T are stored.
        value_TKD: the same.
        cache_BKNC: [B, KV, N, 2 * D], keys in the first D channels and values in the rest, any strides.
        slots_T: [T] integer, block * N + place in the block; negative for padding, which is skipped.
    """
    tokens, (kv_heads, size) = len(slots_T), key_TKD.shape[1:]
    if not tokens:
        return
    _store[(tokens, kv_heads)](
        key_TKD, value_TKD, cache_BKNC, slots_T, *key_TKD.stride()[:2], *value_TKD.stride()[:2], *cache_BKNC.stride()[:3],
        D=size, N=cache_BKNC.shape[2], BLOCK_D=triton.next_power_of_2(size), num_warps=1,
        **early_launch(cache_BKNC.device),
    )  # fmt: skip


@triton.jit
def _store(
    key_ptr, value_ptr, cache_ptr, slots_ptr, stride_kt, stride_kh, stride_vt, stride_vh, stride_cb, stride_ch, stride_cn,
    D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one token and one head."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    key = tl.load(key_ptr + token * stride_kt + head * stride_kh + d, mask=d < D)
    value = tl.load(value_ptr + token * stride_vt + head * stride_vh + d, mask=d < D)
    place = cache_ptr + (slot // N) * stride_cb + head * stride_ch + (slot % N) * stride_cn + d
    tl.store(place, key.to(cache_ptr.dtype.element_ty), mask=d < D)
    tl.store(place + D, value.to(cache_ptr.dtype.element_ty), mask=d < D)
