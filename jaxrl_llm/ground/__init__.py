"""What the other rooms stand on; imports none of them. Of arrays: names of axes, masked sums, metrics that merge
exactly, the mesh, what processes tell one another. Of a config: how a field is declared and checked. Of the machine:
its cores, memory, signals and terminal, worker processes with limits, files that may be damaged, and
those of a hub."""
