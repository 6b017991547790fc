"""Resolution of Hugging Face hub names and GGUF files to folders on this machine.

A run stores the resolved names: a model's folder in the cache, whose name is the commit, and a data
set's name with its commit. A resumed run uses the commits that it started with. A model in a GGUF
file becomes the folder into which it was read.
"""

import json
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config import Config, ConfigError, load_config, parse_config, set_dotted
from megatron_rl.config.loading import MODELS
from megatron_rl.config.sections import HUB_NAME
from megatron_rl.data.hub import HubSet, find_snapshot, is_on_hub
from megatron_rl.errors import UserError
from megatron_rl.preflight.gguf_models import find_gguf, folder_of_gguf


def resolve_hub_names(
    config: Config, *, echo: Callable[[str], object] = lambda text: None
) -> tuple[Config, list[str], list[str]]:
    """Return the config with hub names resolved, equal overrides for other processes, problems.

    Names that cannot be resolved are unchanged; the checks that follow report them.
    echo: receives a line before each download. Raises ConfigError for an unusable GGUF file.
    """
    resolved = {key: str(folder) for key, folder in _read_gguf_files(config, echo=echo).items()}
    problems = []
    earlier = _earlier_names(config)
    for key, name in _names(config).items():
        try:
            if is_on_hub(name):
                resolved[key] = _resolve_set(name, earlier.get(key, ""), echo)
            elif not Path(name).exists() and HUB_NAME.fullmatch(name) and is_model(key):
                resolved[key] = _resolve_model(name, earlier.get(key, ""), echo)
        except ValueError as error:
            problems.append(f"{key}: {error}")
    changed = _with_names(config, resolved)
    values = changed.model_dump()
    # A set's own name may contain a dot, so the overrides contain whole mappings of sets.
    settings = sorted({".".join(key.split(".")[:2]) for key in resolved})
    pairs = [(field, values[field.split(".")[0]][field.split(".")[1]]) for field in settings]
    overrides = [f"{key}={json.dumps(value)}" for key, value in pairs]
    return changed, overrides, problems


def with_gguf_folders(config: Config, *, echo: Callable[[str], object]) -> Config:
    """Return the config with the folder of each model that is given as a GGUF file.

    echo: receives a line before a file is read. Raises ConfigError for an unusable GGUF file.
    """
    if not (folders := _read_gguf_files(config, echo=echo)):
        return config  # with its record of what was set
    return _with_names(config, {key: str(folder) for key, folder in folders.items()})


def _with_names(config: Config, names: dict[str, str]) -> Config:
    """Return the config with these names at the keys of `_names`."""
    values = config.model_dump()
    for key, name in names.items():
        section, _, setting = key.partition(".")
        field, dot, in_set = setting.partition(".")  # data.mix.NAME, eval.sets.NAME
        if not dot:
            set_dotted(values, key, name)
        elif isinstance(values[section][field][in_set], str):
            values[section][field][in_set] = name
        else:
            values[section][field][in_set]["path"] = name
    return parse_config(values)


def _read_gguf_files(config: Config, *, echo: Callable[[str], object]) -> dict[str, Path]:
    """Return the folders of models that are GGUF files, reading those that were not read before."""
    folders, cache = {}, Path(config.run.dir) / "gguf"  # for files in a folder without permission
    for key, name in _names(config).items():
        try:
            if is_model(key) and (file := find_gguf(name)) is not None:
                folders[key] = folder_of_gguf(file, echo=echo, or_in=cache)
        except UserError as error:
            raise ConfigError(f"{key}: {error}") from None
    return folders


def is_model(key: str) -> bool:
    """Return True for the key of a model, also where the key names several models."""
    return key in MODELS or key.startswith("model.reference.")


def find_cached_config(name: str) -> Path | None:
    """Return the folder of a hub model's config.json in the cache, without a download."""
    if (match := HUB_NAME.fullmatch(name)) is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = match.groups()
    file = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def hub_problem(name: str) -> str | None:
    """Explain why this hub model is unavailable and how to get it; None if it is not a hub name."""
    try:
        if HUB_NAME.fullmatch(name):
            _resolve_model(name, "", lambda text: None)
    except ValueError as error:
        return f"as a name on the Hugging Face hub: {error}"
    return None


def _names(config: Config) -> dict[str, str]:
    """Collect the settings that may be hub names, by key."""
    models = {"model.path": config.model.path, **config.given_models}
    if config.offline.behavior != "file":
        models["offline.behavior"] = config.offline.behavior
    files = {key: path for key, (path, _) in config.prompt_files.items()}
    return {key: name for key, name in (models | files).items() if name}


def _earlier_names(config: Config) -> dict[str, str]:
    """Collect the names in the config of the run that will be resumed."""
    if config.run.resume != "auto" or config.run.name is None:
        return {}
    file = Path(config.run.dir) / config.run.name / "config.yaml"
    return _names(load_config(file)) if file.is_file() else {}


def _resolve_model(name: str, earlier: str, echo: Callable[[str], object]) -> str:
    match = HUB_NAME.fullmatch(name)
    assert match is not None, f"{name} was matched before"
    repository, revision = match.groups()
    cached = Path(earlier)
    if revision is None and cached.parts[-3:-1] == (
        f"models--{repository.replace('/', '--')}", "snapshots",
    ):  # fmt: skip
        revision = cached.name
    return str(find_snapshot(repository, revision, kind="model", echo=echo))


def _resolve_set(name: str, earlier: str, echo: Callable[[str], object]) -> str:
    wanted = HubSet.parse(name)
    if wanted.revision is None and is_on_hub(earlier):
        before = HubSet.parse(earlier)
        if before._replace(revision=None) == wanted:
            wanted = before
    folder = find_snapshot(wanted.repository, wanted.revision, kind="dataset", echo=echo)
    return str(wanted._replace(revision=folder.name))
