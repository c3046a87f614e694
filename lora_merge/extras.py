"""Import what is optional, and tell what is not installed from what is installed and fails to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingExtra


@contextmanager
def needed(what: str, install: str, *packages: str) -> Iterator[None]:
    """Turn a failure of the imports in the block into a `MissingExtra` that says what is wrong.

        with needed("VllmSync needs vLLM", "'lora-merge[vllm]'", "vllm"):
            import vllm

    A library that is there can fail in other ways than by an ImportError: a torchvision of another torch raises a
    RuntimeError in the middle of transformers, which `pip install` does not mend.

    Args:
        what: what needs it, in words: the beginning of the message.
        install: what brings it, as `pip install` takes it.
        packages: top-level names of the modules; one of these that is not found is not installed.
    """
    try:
        yield
    except MissingExtra:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in packages:
            raise MissingExtra(f"{what}: pip install {install}") from error
        raise MissingExtra(
            f"{what}, and {' or '.join(packages)} is installed here but fails to import ({root_of(error)}): mend or "
            "reinstall what that names, in versions that fit together"
        ) from error


def root_of(error: BaseException) -> str:
    """Return the error that began it, in one line: libraries that import lazily raise others on top of it."""
    seen = {id(error)}
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(cause) in seen:
            break
        seen.add(id(cause))
        error = cause
    told = str(error).strip().splitlines()
    return f"{type(error).__name__}: {told[0]}" if told else type(error).__name__
