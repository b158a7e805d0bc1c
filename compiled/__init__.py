"""Tier 2, compiled: the operators of the reference through torch.compile, no hand-written kernel."""
