"""Checks of arguments, and the wording of errors: start with `checks.py`. Imports nothing else of the package."""
