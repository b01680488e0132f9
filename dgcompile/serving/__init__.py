"""Answering many requests at once: what every front (Triton, HTTP, bulk files) shares, and the fronts themselves."""
