"""Jobs: from a recipe and a number of nodes to a checked, staged, placed batch job. Entry point: fugaku-megatron job."""
