"""The paper's language stage: causal language models on text."""
