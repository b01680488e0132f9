"""Attention of one block of tokens over a cache and the block itself."""
