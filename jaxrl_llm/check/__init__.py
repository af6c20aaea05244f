"""A look at a run before it starts. In: an assembled run. Out: doubts about its data and weights, the memory that its
compiled programs need, and a table of what a rehearsal of two steps shows."""
