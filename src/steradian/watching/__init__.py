"""What any optimizer does to the weights, step by step: `steradian.watch(optimizer, …)` and its records."""
