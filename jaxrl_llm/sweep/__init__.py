"""Many runs. In: a sweep file, which is data: arms, seeds, fields. Out: processes that take the runs, a DIR for each,
and DIR/sweep.json for the report. The same command goes on where it stopped. Arms may fork from states of one run."""

from jaxrl_llm.sweep.planned import Branching, Sweep, chain, each, product, zipped

__all__ = ["Branching", "Sweep", "chain", "each", "product", "zipped"]
