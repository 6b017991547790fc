"""The choice of a user's own loss, `objective.function`; needs no torch.

`check_function` reads the source instead of importing it, so that a launcher without torch can
check a config before processes start.
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import UserError
from megatron_rl.objectives.checked import Checked, Positive
from megatron_rl.objectives.spec import Aggregation, check_constant

FUNCTION = "function"  # the name of the objective whose loss is a user's own
PARAMETERS = ("policy_logprobs", "behavior_logprobs", "advantages", "mask", "statistics")


@dataclass(frozen=True)
class FunctionSpec(Checked):
    """A user's own per-token loss, as `module:function`, and its aggregation."""

    function: str
    aggregation: Aggregation = "response_mean"
    constant: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, name = self.function.partition(":")
        if not (all(part.isidentifier() for part in module.split(".")) and name.isidentifier()):
            raise UserError(
                f"function is {self.function!r}: it must be module:function, such as my_losses:loss"
            )
        check_constant(self.constant, self.aggregation)

    @property
    def needs(self) -> dict[str, object]:
        """No optional inputs."""
        return {}


def check_function(name: str) -> None:
    """Raise UserError unless the source of `module:function` defines a function of 5 arguments."""
    module, _, function = name.partition(":")
    stem = Path(*module.split("."))
    files = [
        file
        for folder in ("", *sys.path)
        for file in (Path(folder, stem.with_suffix(".py")), Path(folder, stem, "__init__.py"))
        if file.is_file()
    ]
    if not files:
        raise UserError(
            f"objective.function={name}: there is no module {module}; start in the folder that "
            "contains it, or install it"
        )
    try:
        body = ast.parse(files[0].read_bytes()).body
    except SyntaxError as error:
        raise UserError(f"objective.function={name}: {files[0]}: {error}; correct it") from None
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    imported = any(isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) for node in body)
    if function not in functions:
        if function in files[0].read_text(encoding="utf-8") and imported:
            return  # possibly imported from elsewhere, or decorated: importing it will show
        raise UserError(
            f"objective.function={name}: {files[0]} has no function {function}; it has "
            f"{', '.join(functions) or 'none'}"
        )
    arguments = functions[function]
    count = len(arguments.posonlyargs + arguments.args)
    required = count - len(arguments.defaults)
    if not (required <= len(PARAMETERS) and (arguments.vararg or count >= len(PARAMETERS))):
        raise UserError(
            f"objective.function={name} takes {count} arguments; it must take "
            f"{len(PARAMETERS)}: {', '.join(PARAMETERS)}"
        )
