"""The supported architectures, one file each: a file that is here is supported."""

import importlib
import pkgutil

from megatron_rl.models.weights import Architecture


def _found() -> list[Architecture]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").ARCHITECTURE for name in names]


ARCHITECTURES = {architecture.name: architecture for architecture in _found()}
