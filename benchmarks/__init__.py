"""Speed against peers: ratios measured side by side in one run on one machine."""
