"""Mistakes, planted, and the words in which they must be reported."""
