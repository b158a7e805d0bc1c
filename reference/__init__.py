"""Tier 1, the reference: what the model is, in plain eager PyTorch. Needs torch only and runs on any device."""
