"""How the network is spread over processes."""
