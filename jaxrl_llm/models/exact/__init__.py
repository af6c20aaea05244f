"""Numerics that do not depend on the batch. In: parameters and tokens in any arrangement. Out: for each token the same
bits. Loaded where `model.numerics=exact`."""
