"""Run an engine in a process of its own: `python engine_process.py FOLDER OPTIONS_JSON`; prints one line of JSON.

For engines that need several processes or torch.compile, neither of which fits into the process of the tests.
"""

import json
import sys
from pathlib import Path

from vllm import LLM
from vllm.lora.request import LoRARequest

from tiers.reference.load import load_model
from tiers.reference.testing.tiny import random_ids
from tiers.vllm_model.testing import dispatch_counts, worst_error


def main() -> None:
    from vllm import SamplingParams

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    adapter, merged = options.pop("adapter", None), options.pop("merged", None)
    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "block_size": 16,
        "additional_config": {"tiers": "reference"},
    }
    engine = LLM(model=str(folder), **{**defaults, **options})
    prompts = [{"prompt_token_ids": random_ids(length, 320, seed=length)} for length in (3, 40, 70)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=0)
    request = LoRARequest("adapter", 1, adapter) if adapter else None
    outputs = engine.generate(prompts, sampling, use_tqdm=False, lora_request=request)
    result = {
        "error": worst_error(outputs, load_model(Path(merged) if merged else folder)),
        "counts": engine.apply_model(dispatch_counts),
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
