"""Many hosts as one worker: who am I, the roll call, barriers, one answer for all, one end for all."""
