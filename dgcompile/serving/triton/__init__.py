"""Triton Inference Server: the model repository, its check, and the model that the server runs."""
