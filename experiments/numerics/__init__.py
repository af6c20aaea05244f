"""Where two computations of one token differ, how far, and what exact numerics leave of it."""
