"""From the DIRs of runs to numbers with intervals, figures and a page."""
