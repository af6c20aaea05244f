"""Grouped-query attention. In: hidden states, positions, segments, perhaps a cache. Out: hidden states. The core by
our own backward, by a flash kernel, or with tokens spread over devices."""
