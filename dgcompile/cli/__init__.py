"""The command line. It parses, calls the library and renders; nothing else imports it."""

from dgcompile.cli.app import main

__all__ = ["main"]
