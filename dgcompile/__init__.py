"""dgcompile: from a DiffusionGemma checkpoint to compiled engines, and the loop that runs them."""

__version__ = "0.1.0"
