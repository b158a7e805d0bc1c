"""A bank of learned key/value slots that every token looks up by attention.

Legend: T tokens, M model width, N slots, C channels of a value.
"""

from torch import Tensor


def knowledge_bank(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float) -> Tensor:
    """e = softmax(h K^T * scale) V, one knowledge vector per token.

    Args:
        hidden_TM: [T, M] h.
        keys_NM: [N, M] K, same dtype.
        values_NC: [N, C] V, same dtype. C is M, or more where `fold` has been applied to the values beforehand.
        scale: multiplies h . k; M ** -0.5 unless the config says otherwise.

    Returns:
        [T, C] in the dtype of hidden_TM.

    Raises:
        ValueError: shapes disagree; names the argument, expected and found.

    Source: attention over persistent memory vectors, Sukhbaatar et al. 2019 (1907.01470), outside the self-attention.
    """
    check(hidden_TM, keys_NM, values_NC)
    # The softmax is done in float32 whatever the dtype: with many slots, bf16 sums lose the small weights.
    weights_TN = (
        (hidden_TM @ keys_NM.T).float().mul(scale) if hidden_TM.element_size() < 4 else hidden_TM @ keys_NM.T * scale
    )
    return weights_TN.softmax(dim=-1).to(hidden_TM.dtype) @ values_NC


def check(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor) -> None:
    """Raises:
    ValueError: see `knowledge_bank`.
    """
    width = hidden_TM.shape[-1]
    if keys_NM.shape[-1] != width:
        raise ValueError(f"keys_NM has width {keys_NM.shape[-1]}; expected {width}, that of hidden_TM")
    if len(values_NC) != len(keys_NM):
        raise ValueError(f"values_NC has {len(values_NC)} rows; expected {len(keys_NM)}, one per key")
