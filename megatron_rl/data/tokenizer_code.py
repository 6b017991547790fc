"""Import of a tokenizer's class from the code in its model folder."""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError


def import_class(folder: Path, name: str) -> Any:
    """Import `module.Class` from a model folder, as a package of its own.

    Nothing is copied to a cache, unlike by transformers: ranks that start at the same time cannot
    read half of a file. Raises UserError if the class cannot be imported.
    """
    module, _, kind = name.rpartition(".")
    if "--" in name or not (folder / f"{module.replace('.', '/')}.py").is_file():
        raise UserError(
            f"{folder}: auto_map in tokenizer_config.json names {name}, which is not in the "
            f"folder; copy {module.rpartition('--')[2]}.py of the published model into it, and "
            "name it without a repository"
        )
    _provide_old_names()
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    package = f"tokenizer_code_{digest}"
    if package not in sys.modules:  # relative imports of the code need one
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(folder.resolve())]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # the folder stays as it is
    try:
        return getattr(importlib.import_module(f"{package}.{module}"), kind)
    except Exception as error:  # code of others
        raise UserError(
            f"{folder}: the tokenizer's code {name} cannot be imported ({error}); install what it "
            "needs, or take its version for the installed transformers"
        ) from error
    finally:
        sys.dont_write_bytecode = writes


def _provide_old_names() -> None:
    """Provide a name that the published tokenizers of Moonlight and Kimi import.

    transformers 5 has it in another module.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.gpt2 import tokenization_gpt2

    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        tokenization_gpt2.bytes_to_unicode = bytes_to_unicode
