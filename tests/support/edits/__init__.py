"""Optimized modules with one edit, as a mistake of a compiler would make it, and what the proof says of them."""
