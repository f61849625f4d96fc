"""Pairs of programs whose truth is known, for the proof for all inputs: drawn, rewritten, or planted with a mistake."""
