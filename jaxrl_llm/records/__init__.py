"""The output directory of a run, its DIR. In: states, rows of metrics, samples, a config. Out: checkpoints with
digests, metrics.jsonl, samples.jsonl, config.json, TensorBoard, the screen; and all of it read again. Knows files,
not what is trained."""
