"""The supported architectures: those that the modules of this package define."""

import importlib
import pkgutil

from megatron_rl.models.weights import Architecture


def _load_all() -> list[Architecture]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [
        each for module in modules for each in vars(module).values()
        if isinstance(each, Architecture)
    ]  # fmt: skip


ARCHITECTURES = {architecture.name: architecture for architecture in _load_all()}
