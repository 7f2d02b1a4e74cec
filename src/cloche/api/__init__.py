"""The HTTP API: parse, authorise, answer. One resource a file; errors meet HTTP in `problems`."""
