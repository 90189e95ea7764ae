"""Random number operators."""
