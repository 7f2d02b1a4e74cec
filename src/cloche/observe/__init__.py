"""What an operator sees of a server: its metrics, its traces and its log."""
