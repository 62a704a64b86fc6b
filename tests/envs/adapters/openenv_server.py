"""Real OpenEnv servers for the tests, run by the Python that has ``openenv``: guess a number."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Bet(Action):
    number: int
    word: Literal["more", "less"]


class Said(Observation):
    text: str


class Game(Environment[Any, Said, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, top: int = 9, **kwargs: Any) -> Said:
        self.secret = (seed or 0) % top + 1
        return Said(text=f"A number from 1 to {top}:")

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Said:
        if action.number == 666:
            raise ZeroDivisionError("the devil's number")
        if action.number == 999:
            os._exit(1)
        right = action.number == self.secret
        return Said(text="Right." if right else "Wrong.", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


async def main() -> None:
    """Three of them: one number, two fields, room for one session."""
    async with asyncio.TaskGroup() as group:
        for action, sessions in ((Guess, 64), (Bet, 64), (Guess, 1)):
            listening = socket.create_server(("127.0.0.1", 0))
            print(listening.getsockname()[1], flush=True)
            app = create_fastapi_app(Game, action, Said, max_concurrent_envs=sessions)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            group.create_task(server.serve(sockets=[listening]))


if __name__ == "__main__":
    asyncio.run(main())
