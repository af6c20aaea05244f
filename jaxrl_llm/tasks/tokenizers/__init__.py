"""Text to tokens and back. In: a folder with tokenizer.json, a GGUF file, or an alphabet. Out: a `Tokenizer`, with
its chat template where there is one."""
