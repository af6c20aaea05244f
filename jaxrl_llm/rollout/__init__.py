"""Groups of answers. In: parameters and prompts. Out: a `Trajectory` of tokens, the sampler's log-probs and the
experts of every token; and the verifier's rewards. One decoder, two loops: all at once, or slots that refill."""
