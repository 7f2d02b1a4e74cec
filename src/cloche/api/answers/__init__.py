"""What the calls answer, each with an example: read by the API's description alone."""
