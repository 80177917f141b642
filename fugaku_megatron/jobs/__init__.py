"""Jobs: from a recipe and nodes to a checked batch job. Entry point: fugaku-megatron job."""
