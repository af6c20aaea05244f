"""From DIRs to a page. In: the logs of one run, of several, or of a sweep. Out: tables with paired differences and
their intervals, figures, report.md and report.html. It reads what runs wrote and imports none of their code."""
