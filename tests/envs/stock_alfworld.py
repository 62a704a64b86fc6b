"""Plays commands on ALFWorld's own engine and prints what it says.

Given on the standard input: ``[[game, [command …]] …]``.

In a process of its own: the translator changes ``sys.argv`` and the standard output.
"""

import json
import sys

import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos, AlfredTWEnv
from textworld.envs import PddlEnv

out = sys.stdout
config = {
    "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
    "dataset": {"data_path": sys.argv[1], "num_train_games": 0},
}
found = AlfredTWEnv(config, train_eval="train").game_files
infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
env = AlfredInfos(AlfredDemangler(PddlEnv(infos), shuffle=False))
played = []
for game, commands in json.load(sys.stdin):
    env.load(game)
    state = env.reset()
    said = [[state.feedback, state.admissible_commands, False]]
    for command in commands:
        state, _, done = env.step(command)
        said.append([state.feedback, state.admissible_commands, done])
    played.append(said)
print(json.dumps({"found": sorted(found), "played": played}), file=out)
