"""One operator per file: the same file name, function name and signature as in the reference."""
