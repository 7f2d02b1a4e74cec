"""Runs jobs: takes them from the queue, gives each a machine, writes its history, ends it."""
