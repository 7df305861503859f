"""Launch, rendezvous, heartbeats, stall detection and failure reports of the ranks of a run."""
