"""The step. In: a state and a batch with its layout. Out: the next state and metrics. The only room that sees
objectives and models: scoring, advantages, routing replay, micro-batches, the optimizer, and the sources of batches."""
