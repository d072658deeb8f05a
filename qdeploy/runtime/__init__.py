"""The runtime: engine, scheduler, block manager, sampler and executors (DESIGN §5–7)."""
