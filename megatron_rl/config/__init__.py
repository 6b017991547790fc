"""Configs: all settings with type, default and rule (`docs/configuration.md`), and their loading.

Configs are strict: an unknown key or an invalid value is an error that names the key, the rule and
the nearest valid key; all errors are reported together.
"""

from megatron_rl.config.config import Config
from megatron_rl.config.loading import (
    ConfigError,
    apply_override,
    dump_config,
    expand_dotted_keys,
    explain,
    load_config,
    long_form,
    parse_config,
    read_config_values,
    read_mapping,
    set_dotted,
    valid_keys,
    with_absolute_paths,
)
from megatron_rl.config.sections import (
    AdvantageSection,
    EvalSection,
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
    "expand_dotted_keys",
    "explain",
    "load_config",
    "long_form",
    "parse_config",
    "set_dotted",
    "read_config_values",
    "read_mapping",
    "valid_keys",
    "with_absolute_paths",
]
