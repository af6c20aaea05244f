"""Grouped-query attention. In: hidden states, positions, segments, perhaps a cache. Out: hidden states. The core has
a hand-written backward, or is a flash kernel, or with tokens spread over devices."""
