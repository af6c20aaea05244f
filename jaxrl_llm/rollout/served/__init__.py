"""Code inside a vLLM server, in the server's environment: this folder is on its path, and nothing of it imports
jax or the package. In: weights, in files or over HTTP. Out: answers with the experts of every token."""
