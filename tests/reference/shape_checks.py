"""Types of the package's functions, checked at each call: by beartype, and by jaxtyping where axes are named.

Functions that stand in functions are left alone: each call would make, and decorate, them anew.

jaxtyping's import hook alone binds the arguments of every function to its signature and checks them twice, which took a
tenth of the tests.
"""

import functools
import inspect
import sys
import typing

import jaxtyping

_jaxtyped = jaxtyping.jaxtyped

if sys.version_info < (3, 12):  # later ones keep what a protocol asks for
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


def install(package):
    """Check what is imported from the package from now on."""
    jaxtyping.jaxtyped = _jaxtyped_once
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _jaxtyped_once(*, typechecker):
    """Return the decorator that the hook puts on every function and class."""

    def decorator(decorated):
        if "<locals>" in decorated.__qualname__:
            return decorated
        hints = decorated.__annotations__.values() if inspect.isfunction(decorated) else [""]
        parts = [part for hint in hints for part in _parts(hint)]
        if any(isinstance(part, str | typing.ForwardRef) for part in parts):
            return _jaxtyped(decorated, typechecker=typechecker)  # a class, or a type that jaxtyping looks up
        checked = typechecker(decorated)
        if any(type(part).__module__.startswith("jaxtyping") for part in parts):
            checked = _jaxtyped(checked, typechecker=None)

        @functools.wraps(decorated)
        def called(*args, **fields):
            return (decorated if jaxtyping.config.jaxtyping_disable else checked)(*args, **fields)

        return called

    return decorator


def _parts(hint):
    """The type and all types within it."""
    yield hint
    if typing.get_origin(hint) is not typing.Literal:
        for part in hint if isinstance(hint, list) else typing.get_args(hint):
            yield from _parts(part)
