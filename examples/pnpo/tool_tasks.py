"""The environments of `tools.yaml`: one written by hand, one of a Python function as a tool."""

from megatron_rl.environments import Answer, ToolEnvironment


class Ask:
    """The first turn is a question; the answer names the digit that the second turn must repeat."""

    def __init__(self, row, seed):
        self.digit, self.has_asked = row["answer"], False

    async def step(self, message):
        if self.has_asked:
            return Answer(reward=float(message == self.digit), done=True, reason="answered")
        self.has_asked = True
        return Answer(self.digit)


def lookup(key: str, *, row) -> str:
    """Return the digit of a key.

    Args:
        key: A letter.
    """
    return row["table"][key]


class Lookup(ToolEnvironment):
    """The prompt names a key; its digit, which only the tool can find, is the right answer."""

    tools = (lookup,)

    def reward(self, text):
        return float(text == self.row["answer"])
