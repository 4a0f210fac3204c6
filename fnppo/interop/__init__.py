"""To and from other libraries, none of which is imported before a function here needs it."""
