"""Start the real SGLang server (0.5.23) on a machine that has neither a GPU nor SGLang's CPU kernels.

    VENV/bin/python launch/sglang_cpu.py --model-path MODEL --port 30000 [any other sglang.launch_server argument]

Run it with the environment that ``launch/install_sglang.sh`` makes. What the CPU needs is filled in where the command
line does not say otherwise (``CPU_DEFAULTS``, ``ENVIRONMENT``).

SGLang imports two packages that have no CPU build, although nothing on this path calls them: ``sgl_kernel`` (names for
speculative decoding; without AMX every layer takes its plain torch path) and ``torchvision`` (image models). This file
puts placeholder modules in their place, in its own processes only. Calling anything in them raises. The placeholders
are made at import time because SGLang spawns its scheduler and detokenizer, and each child imports this file anew.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import sys
import types

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Else /health generates a token (a second each) and answers 503 while generation is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # More threads make every decode step of a small model slower, not faster.
    "OMP_NUM_THREADS": "1",
}

CPU_DEFAULTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    # By default the KV cache takes a share of the whole memory, and touching it all takes seconds.
    "--max-total-tokens": "65536",
    "--mem-fraction-static": "0.05",
    "--disable-overlap-schedule": None,
    # Else an idle scheduler keeps a core busy, which the trainer needs.
    "--sleep-on-idle": None,
    # Else every chunk of a stream repeats all tokens before it.
    "--incremental-streaming-output": None,
}


class Placeholder(types.ModuleType):
    """A module whose every public name is a class that cannot be made."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"

        def refuse(cls: type, *args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{full_name} has no CPU build: launch/sglang_cpu.py put a placeholder there")

        return type(name, (), {"__new__": refuse})


def install_placeholders() -> None:
    """Make ``sgl_kernel`` and ``torchvision`` importable, unless they are there already."""
    names = ["sgl_kernel"]
    if importlib.util.find_spec("torchvision") is None:
        # transformers caches this answer, so it goes on saying no when the placeholder is in place.
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()
        names += ["torchvision", "torchvision.transforms", "torchvision.transforms.functional"]
    for name in names:
        module = sys.modules[name] = Placeholder(name)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def with_defaults(arguments: list[str]) -> list[str]:
    """``arguments`` plus those of ``CPU_DEFAULTS`` that they do not set."""
    given = {argument.partition("=")[0] for argument in arguments}
    missing = {option: value for option, value in CPU_DEFAULTS.items() if option not in given}
    return arguments + [word for pair in missing.items() for word in pair if word is not None]


def cores_of_ranks(arguments: list[str]) -> str:
    """``SGLANG_CPU_OMP_THREADS_BIND``: a core for each of the ``--tp-size`` ranks in turn. Without it SGLang starts no
    more ranks than the machine has NUMA nodes. Empty, which is SGLang's own choice, for a single rank."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    ranks = parser.parse_known_args(arguments)[0].tp_size
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)) if ranks > 1 else ""


def main() -> None:
    if cores := cores_of_ranks(sys.argv[1:]):
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(with_defaults(sys.argv[1:])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


for variable, value in ENVIRONMENT.items():
    os.environ.setdefault(variable, value)

if importlib.util.find_spec("sglang") is None:
    sys.exit(f"{sys.executable} has no sglang: install it with launch/install_sglang.sh VENV, then use VENV/bin/python")

if "sgl_kernel" not in sys.modules:
    install_placeholders()

if __name__ == "__main__":
    main()
