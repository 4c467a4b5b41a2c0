"""Which weights are where: slots, the machine that moves them, agreement, digests, checkpoints, resume.

The bottom storey: imports neither `workers` nor `orchestrator`, and no Ray, Megatron or engine.
"""
