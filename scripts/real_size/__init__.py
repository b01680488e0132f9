"""What ``scripts/real_size_check.py`` is made of."""
