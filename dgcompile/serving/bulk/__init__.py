"""Bulk files: many requests from a JSON-lines file, answered into another, through the same service as every front.

:func:`~dgcompile.serving.bulk.run.run_bulk` is the whole work. A run that is killed is continued by the same call.
"""
