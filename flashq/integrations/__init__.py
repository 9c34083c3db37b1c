"""flashq inside other libraries, each of which is needed only by the module of its name."""
