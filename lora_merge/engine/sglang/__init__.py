"""SGLang: what runs in its schedulers, and what calls its API."""
