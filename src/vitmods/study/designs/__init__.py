"""One design of studies per file; they register themselves."""
