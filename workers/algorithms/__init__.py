"""Advantages, KL, policy and value losses. Pure torch: no Megatron, no Ray."""
