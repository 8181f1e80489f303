"""One page from recorded runs, without torch: `st.report(runs, out)`."""
