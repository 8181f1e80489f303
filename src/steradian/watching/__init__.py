"""What any optimizer does to the weights, step by step: `st.watch(optimizer, …)` and its records."""
