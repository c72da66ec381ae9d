"""The paper's studies: one recipe per table, run system by system, every number beside the paper's."""
