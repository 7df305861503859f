"""How the ranks of a run start, meet, beat, fail and are reported."""
