"""Groups of answers to prompts. In: parameters and prompts. Out: a `Trajectory` of tokens, the sampler's log-probs and
the experts of every token, and what the task's verifier says of the answers. One decoder, two loops: all answers at
once, or slots that refill."""
