"""Differences between two computations of one token, their sources, and what exact numerics leave of them."""
