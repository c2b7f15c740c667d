"""What a model wrote, parsed into text, thoughts and tool calls."""
