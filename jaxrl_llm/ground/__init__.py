"""The foundation of the other rooms; it imports none of them. For arrays: names of axes, masked sums, metrics that
merge exactly, the mesh, messages between processes. For a config: how a field is declared and checked. For the machine:
its cores, memory, signals and terminal, worker processes with limits, files that may be damaged, and
those of a hub."""
