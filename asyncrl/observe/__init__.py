"""What a run leaves behind and shows while it goes: metrics, trajectories, trace, summary, report, live progress."""
