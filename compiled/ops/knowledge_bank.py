"""The bank of learned slots through torch.compile. Legend: T tokens, M model width, N slots, C channels of a value."""

from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds
from tiers.reference.ops.knowledge_bank import check


def knowledge_bank(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float) -> Tensor:
    """Same contract as the reference, gradients included. Compiles once for all numbers of tokens, with gradients again for one token."""
    check(hidden_TM, keys_NM, values_NC)
    if not len(hidden_TM):
        return hidden_TM @ keys_NM.T @ values_NC
    run = compiled(_knowledge_bank, kinds(hidden_TM, keys_NM, values_NC))
    return run(*first_size_varies(hidden_TM), keys_NM, values_NC, scale)


def _knowledge_bank(hidden_TM: Tensor, keys_NM: Tensor, values_NC: Tensor, scale: float) -> Tensor:
    # The softmax is done in float32 at least, as in the reference.
    scores_TN = hidden_TM @ keys_NM.T
    scores_TN = (scores_TN.float() if scores_TN.element_size() < 4 else scores_TN) * scale
    return scores_TN.softmax(dim=-1).to(hidden_TM.dtype) @ values_NC
