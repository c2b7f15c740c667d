"""Words, messages, the text pipeline, pages and the engine: what every process of Tandem shares."""
