"""How a pass runs: observe, decide, act, verify, record, over ports."""
