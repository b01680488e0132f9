"""What ``scripts/gpu_check.py`` is made of. Needs torch, triton and numpy only, and any Hopper or Blackwell GPU."""
