"""The training worker on megatron-core, one code path for CPU (gloo) and CUDA (nccl)."""
