"""Checks of arguments, and the wording of errors. Start with `checks.py`. Imports nothing else of the package."""
