"""Batches and the step. In: a state and a stream of prompts, pairs or given answers. Out: the next state and metrics.
Sources make batches (rollouts scored, rewarded, replayed), a layout cuts them, the step updates. The only room that
computes with objectives and models at once."""
