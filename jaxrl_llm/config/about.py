"""What the package's metadata says of it: its version and its public address. Nothing is imported for it."""

import importlib.metadata
import sys

import jaxrl_llm

NO_ADDRESS = "the package's metadata has no address ([project.urls] of pyproject.toml)"


def versions() -> str:
    """What runs here: the package, JAX and Python."""
    jax = next((found.version for found in importlib.metadata.distributions(name="jax")), "none")
    return f"jaxrl_llm {jaxrl_llm.__version__}, jax {jax}, Python {sys.version.partition(' ')[0]}"


def address(*labels: str) -> str:
    """The first of these [project.urls] that the package has, "Issues" for example; "" if it has none of them."""
    installed = importlib.metadata.distributions(name="jaxrl_llm")  # none for a checkout that is not installed
    given = [url.split(", ", 1) for one in installed for url in one.metadata.get_all("Project-URL") or []]
    return next((url for label in labels for name, url in given if name == label), "")
