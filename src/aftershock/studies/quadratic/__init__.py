"""The paper's controlled quadratic systems."""
