"""Where machines come from. One package for each rung; the composition root picks one."""
