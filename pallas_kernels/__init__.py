"""Device ops of the engine. A leaf package: it knows nothing of Llama, requests or files."""
