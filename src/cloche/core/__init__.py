"""Values, protocols and errors that every layer speaks. No I/O; imports nothing of ours."""
