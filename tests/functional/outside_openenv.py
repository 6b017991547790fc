"""An environment of OpenEnv and its client as their user wrote them, started as a program."""

import asyncio
import json
import sys
import threading
import time

import uvicorn
from openai import AsyncOpenAI
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Words(Action):
    text: str


class Reply(Observation):
    text: str = ""


class Talk(Environment):
    """Asks for more twice, and rewards each turn by its letters."""

    def reset(self, seed=None, episode_id=None, **further):
        self._state = State(episode_id=episode_id)
        return Reply(text="Go.")

    def step(self, action, timeout_s=None, **further):
        self._state.step_count += 1
        done = self._state.step_count == 3
        return Reply(text="More.", reward=float(len(action.text)), done=done)

    @property
    def state(self):
        return self._state


def serve():
    """Start the server that OpenEnv runs in a container; return its address."""
    config = uvicorn.Config(
        create_fastapi_app(Talk, Words, Reply), host="127.0.0.1", port=0, log_level="error"
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def main(address):
    messages, reward = json.loads(sys.stdin.readline())["prompt"], 0.0
    async with GenericEnvClient(base_url=address) as environment:
        result = await environment.reset(seed=1)
        assert result.observation["text"] == messages[-1]["content"]
        while not result.done:
            answer = await AsyncOpenAI().chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content
            result = await environment.step({"text": text})
            reward += result.reward
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": result.observation["text"]},
            ]
    return reward


if __name__ == "__main__":
    print(asyncio.run(main(serve())))
