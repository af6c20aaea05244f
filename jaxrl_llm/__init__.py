"""Policy optimisation of language models in JAX: PPO to SAPO, on dense and mixture-of-experts transformers."""

__version__ = "0.1.0"
