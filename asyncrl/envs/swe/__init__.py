"""Software engineering: repair a repository until its tests pass. See ``env.SWE``."""

from asyncrl.envs.swe.env import SWE
from asyncrl.envs.swe.rows import Instance, parse_row

__all__ = ["SWE", "Instance", "parse_row"]
