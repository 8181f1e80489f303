"""Pages and figures, computed from recorded tables alone."""
