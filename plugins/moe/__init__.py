"""The mixture of experts: every token through its own top_k gated MLPs."""
