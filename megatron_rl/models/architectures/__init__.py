"""The supported architectures: every module in this package defines one."""

import importlib
import pkgutil

from megatron_rl.models.weights import Architecture


def _load_all() -> list[Architecture]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}").ARCHITECTURE for name in names]


ARCHITECTURES = {architecture.name: architecture for architecture in _load_all()}
