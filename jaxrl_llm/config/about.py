"""Versions of packages and the public address of this one, from their metadata, without importing them."""

import importlib.metadata
import sys

import jaxrl_llm

NO_ADDRESS = "the package's metadata has no address ([project.urls] of pyproject.toml)"


def version_of(package: str) -> str | None:
    """None if it is not installed."""
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


def versions() -> str:
    """Return the versions of the package, JAX and Python."""
    return f"jaxrl_llm {jaxrl_llm.__version__}, jax {version_of('jax')}, Python {sys.version.partition(' ')[0]}"


def address(*labels: str) -> str:
    """The first of these [project.urls] that the package has, "Issues" for example; "" if it has none of them."""
    installed = importlib.metadata.distributions(name="jaxrl_llm")  # none for a checkout that is not installed
    given = [url.split(", ", 1) for one in installed for url in one.metadata.get_all("Project-URL") or []]
    return next((url for label in labels for name, url in given if name == label), "")
