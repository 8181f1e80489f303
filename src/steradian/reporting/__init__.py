"""One page from recorded runs, without torch: `steradian.report(runs, out)`."""
