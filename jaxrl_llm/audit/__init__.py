"""A second opinion on a loss. In: a captured batch with the loss and gradient that another stack reported for it.
Out: the objectives and conventions of `objectives` that reproduce both, and what is wrong with the batch."""
