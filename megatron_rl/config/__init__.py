"""Every setting of a run, with its type, default and rule; `docs/configuration.md` lists them.

A config is strict: an unknown key or a wrong value is an error that names the key, the rule and the
nearest valid key; all errors come at once.
"""

from megatron_rl.config.config import Config
from megatron_rl.config.data_sections import EvalSection
from megatron_rl.config.loading import (
    ConfigError,
    apply_override,
    dump_config,
    explain,
    load_config,
    parse_config,
    put,
    read_mapping,
    valid_keys,
    with_absolute_paths,
)
from megatron_rl.config.sections import (
    AdvantageSection,
    LoggingSection,
    ParallelSection,
    Section,
)

__all__ = [
    "AdvantageSection",
    "Config",
    "ConfigError",
    "EvalSection",
    "LoggingSection",
    "ParallelSection",
    "Section",
    "apply_override",
    "dump_config",
    "explain",
    "load_config",
    "parse_config",
    "put",
    "read_mapping",
    "valid_keys",
    "with_absolute_paths",
]
