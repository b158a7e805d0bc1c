"""What a folder is: numbers and sentences out of its config, its headers, and both; no weight is read.

Functions that return small dataclasses, for `tiers inspect` and `tiers map`. None of them stops at the first fault:
what cannot be known is None or left out, so that the rest can still be said.

files: the weight files, as far as they can be read, and their dtypes
families: which family the folder is of, by config.json and by the names of its tensors
parameters: the checkpoint under our names, with the shapes that rules make of its tensors
geometry: sizes that both the config and the tensors tell
unusual: what a plain Llama does not have
sizes: parameters, and elements in the cache per token
balance: how tokens fall on experts; the one that reads weights, and only when it is asked
coverage: tensors that no rule or no place is about, and parameters that nothing fills
guesses: what a tensor without a place probably is
vocabulary: vocab_size, rows of the matrices, and ids of the tokenizer
tensor_parallel: how tensors are cut, and numbers of ranks that are refused; `tiers serve` asks it too
rules: which part of a tensor each parameter is
layers: numbers of layers as text, and layers that are alike
"""
