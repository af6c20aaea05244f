"""Published checkpoints. In: a folder in the Hugging Face layout, or a GGUF file. Out: a `ModelConfig` and parameters
on their devices; and the way back. One table of tensor names serves both directions."""
