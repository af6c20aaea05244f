"""What everything stands on. In and out: arrays and numbers. Axis letters, masked sums, metrics that merge exactly,
the mesh, what several processes tell one another, checks of ranges, cores and signals. Knows no other room."""
