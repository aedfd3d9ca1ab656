"""The router's HTTP API: OpenAI's, with our parameters beside theirs."""
