"""Advantages, KL, policy losses. Pure torch: no Megatron, no Ray."""
