"""Sources of samples, with one function per source."""
