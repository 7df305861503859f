"""How the ranks of a run start, rendezvous, send heartbeats, fail and are reported."""
