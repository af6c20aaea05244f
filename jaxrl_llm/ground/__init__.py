"""What the other rooms stand on. In and out: arrays and numbers. Names of axes, masked sums, metrics that merge
exactly, the mesh, what several processes tell one another; how a field is declared and checked; the cores, the cache
folder and the signals of the machine. Imports no other room."""
