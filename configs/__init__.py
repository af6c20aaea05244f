"""Configurations: one base with every field, and small deltas on it."""
