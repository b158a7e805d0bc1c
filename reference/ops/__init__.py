"""One operator per file, pure functions. The file name is the operator's name in every tier."""
