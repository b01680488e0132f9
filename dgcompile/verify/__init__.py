"""Compares a bundle with transformers, token for token, with the same random numbers on both sides."""

from dgcompile.verify.report import Difference, PairReport, VerifyReport
from dgcompile.verify.run import read_prompts, verify

__all__ = ["Difference", "PairReport", "VerifyReport", "read_prompts", "verify"]
