"""Foreign models to and from (config, weights), one library a file, each imported only when needed."""
