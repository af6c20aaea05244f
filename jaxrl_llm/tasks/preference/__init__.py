"""Pairs of answers, one preferred to the other. In: a task, or a JSON Lines file of pairs. Out: streams of encoded
pairs for the objectives that read them."""
