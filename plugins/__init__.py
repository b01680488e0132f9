"""The two operations that dgcompile replaces by kernels, one folder each.

``reference.py`` is the meaning of an operation in plain numpy; kernels and engine plugins are measured against it.
"""
