"""Programs of a run, traced for its own devices, whose memory a check asks for, or compiled for chips that need not be
there. In: settings and a topology such as v5p:4x4x4. Out: memory by XLA, FLOPs of the traced program, the time at the
chip's peaks, and what bounds it."""

PROGRAMS = ("move", "rollout", "score", "update")  # here, where the command line finds the names without JAX

__all__ = ["PROGRAMS"]
