"""GPT training on CPU clusters over MPI, with Megatron-LM's interface."""
