"""A program that knows nothing of this package: OpenAI's client, and a row on standard input."""

import json
import sys

from openai import OpenAI


def main():
    row = json.loads(sys.stdin.readline())
    messages = row["prompt"]
    for _ in range(5):
        answer = OpenAI().chat.completions.create(model="policy", messages=messages)
        guess = answer.choices[0].message.content
        if int(guess) == row["secret"]:
            return 1.0
        messages.append({"role": "assistant", "content": guess})
        hint = "higher" if int(guess) < row["secret"] else "lower"
        messages.append({"role": "user", "content": hint})
    return 0.0


if __name__ == "__main__":
    print("starting")
    print(main())
