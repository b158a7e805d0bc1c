"""Hand-written Triton: launchers with the names and signatures of the reference, their kernels beside them."""
