"""Efficient attention in JAX and Flax."""
