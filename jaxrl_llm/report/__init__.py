"""From DIRs to a page. In: the files of one run, of several, or of a sweep, by records/. Out: tables with paired
differences and their intervals, figures, report.md and report.html. It loads no model and runs
no code of a run."""
