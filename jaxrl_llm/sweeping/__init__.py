"""Sweeps as data, and the ways to run them."""
